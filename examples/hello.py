"""Stream one answer. Run it with `python examples/hello.py [MODEL]`."""

from __future__ import annotations

import sys

from steppe import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

with LLM(model) as llm:
    params = SamplingParams(temperature=0, max_tokens=32)
    for chunk in llm.stream("The capital of France is", params):
        print(chunk.text, end="", flush=True)
    print()
