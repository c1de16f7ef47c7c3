"""P44: what a request said depended on its batch. Here the runtime's part, on a backend whose every
token is a hash of its cache; the kernels' part is in the backends' own tests.
"""

from __future__ import annotations

import pytest

from steppe.request import LLMGenerationRequest
from tests.runtime.asking import ask
from tests.runtime.fakes import fake_runtime
from tests.runtime.reference import answer

REQUEST = ask("identical prompts", 12, logprobs=3, prompt_logprobs=2)
ALONE = answer(b"identical prompts", REQUEST.params)


@pytest.mark.parametrize("copies", [1, 2, 4, 8])
@pytest.mark.parametrize("chunk", [1, 5, 16, 512])
def test_copies_and_chunks_change_no_token_and_no_bit_of_a_logprob(copies: int, chunk: int) -> None:
    runtime, _ = fake_runtime(max_step_tokens=chunk, page_size=4)
    response = runtime.handle_request(LLMGenerationRequest.batch([REQUEST] * copies))
    assert response is not None
    for output in response.outputs:
        ALONE.check(output)


@pytest.mark.parametrize("pages", [8, 11, 40])
@pytest.mark.parametrize("position", [0, 2, 5])
def test_other_neighbours_and_less_memory_change_nothing(pages: int, position: int) -> None:
    runtime, _ = fake_runtime(pages=pages, page_size=4)
    runtime.overcommit = True
    batch = [ask(f"neighbour {index}", 2 + 3 * index, temperature=1.0) for index in range(5)]
    batch.insert(position, REQUEST)
    response = runtime.handle_request(LLMGenerationRequest.batch(batch))
    assert response is not None
    ALONE.check(response.outputs[position])


def test_a_batch_that_ran_before_leaves_nothing_behind() -> None:
    runtime, _ = fake_runtime(pages=12, page_size=4)
    for prompt in ("something else", "and another", "identical promptz"):
        runtime.handle_request(ask(prompt, 20))
        response = runtime.handle_request(REQUEST)
        assert response is not None
        ALONE.check(response.outputs[0])
