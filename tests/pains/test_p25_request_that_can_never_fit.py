"""P25: a request that the pool could never hold was admitted, preempted itself and tried again
forever. Runtime part: it is refused with the arithmetic, or it ends in a bounded number of steps.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.errors import ContextLengthError
from steppe.request import FinishReason, LLMGenerationRequest
from tests.runtime.asking import ask
from tests.runtime.fakes import assert_clean, fake_runtime


@settings(max_examples=40)
@given(
    pages=st.integers(1, 6),
    page_size=st.sampled_from([1, 4, 8]),
    prompt=st.integers(1, 40),
    max_tokens=st.one_of(st.none(), st.integers(1, 40)),
    overcommit=st.booleans(),
    twice=st.booleans(),
)
def test_every_request_is_refused_or_ends_in_bounded_steps(
    pages: int,
    page_size: int,
    prompt: int,
    max_tokens: int | None,
    overcommit: bool,
    twice: bool,
) -> None:
    runtime, backend = fake_runtime(pages=pages, page_size=page_size)
    runtime.overcommit = overcommit
    room = pages * page_size
    request = ask([97] * prompt, max_tokens)
    if twice:
        request = LLMGenerationRequest.batch([request, request])
    # A prompt without room for a single token is refused whatever else was asked.
    needed = prompt + 1 if prompt + 1 > room else prompt + (max_tokens or 1)
    if needed > room:
        with pytest.raises(ContextLengthError) as caught:
            runtime.handle_request(request)
        assert (caught.value.needed, caught.value.available) == (needed, room)
        assert backend.launches == 0
        assert_clean(runtime)
        return
    response = runtime.handle_request(request)
    assert response is not None
    assert_clean(runtime)
    count = room - prompt if max_tokens is None else max_tokens
    for output in response.outputs:
        # An open end stops at the wall.
        assert (len(output.token_ids), output.finish_reason) == (count, FinishReason.LENGTH)
    assert backend.launches <= 2 * len(response.outputs) * count


def test_the_trigger_of_the_report() -> None:
    runtime, _ = fake_runtime(pages=3, page_size=16)
    with pytest.raises(ContextLengthError, match="40 prompt tokens and 24 to generate are 64"):
        runtime.handle_request(ask([97] * 40, 24))
    alone = runtime.handle_request(ask([97] * 40, None))
    assert alone is not None
    assert (len(alone.token_ids), alone.finish_reason) == (8, FinishReason.LENGTH)
