"""Two turns of a conversation: the answer goes back in as a message."""

from __future__ import annotations

from steppe import LLM, SamplingParams

with LLM("smollm2-135m") as llm:
    params = SamplingParams(temperature=0, max_tokens=48)
    messages = [{"role": "system", "content": "Answer in one sentence."}]
    for question in ("What is the capital of France?", "Which river runs through it?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, params)
        messages.append({"role": "assistant", "content": answer.text})
        print(f"> {question}\n{answer.text}\n")
