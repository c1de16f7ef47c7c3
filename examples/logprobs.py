"""What the model nearly said: the likeliest tokens at each position of an answer."""

from __future__ import annotations

import math

from steppe import LLM, SamplingParams

with LLM("smollm2-135m") as llm:
    response = llm.generate(
        "The three primary colours are", SamplingParams(temperature=0, max_tokens=8, logprobs=3)
    )
    for position in response.logprobs or ():
        nearly = ", ".join(
            f"{llm.tokenizer.decode([token_id])!r} {math.exp(logprob):.0%}"
            for token_id, logprob in position.top
        )
        print(f"{llm.tokenizer.decode([position.token_id])!r}: {nearly}")
