"""P58: a prompt at the edge of the context was cut, dropped or left waiting. Runtime part: the
table of the edge, with both numbers in every refusal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from steppe.errors import ContextLengthError
from steppe.request import FinishReason
from steppe.runtime.stepped.request import SteppedRequest
from steppe.streaming import StreamChannel
from tests.runtime.asking import ask
from tests.runtime.fakes import assert_clean, fake_runtime

if TYPE_CHECKING:
    from steppe.request import LLMGenerationRequest

CONTEXT = 200


def request(prompt: int, max_tokens: int | None) -> LLMGenerationRequest:
    return ask([97] * prompt, max_tokens, channel=StreamChannel(), prompt_logprobs=0)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "generated"),
    [
        (CONTEXT - 1, None, 1),
        (CONTEXT - 1, 1, 1),
        (CONTEXT - 10, None, 10),
        (CONTEXT - 10, 10, 10),
        (CONTEXT, 0, 0),
    ],
)
def test_what_just_fits_is_served_to_the_last_token(
    prompt: int, max_tokens: int | None, generated: int
) -> None:
    runtime, _ = fake_runtime(page_size=7)
    asked = request(prompt, max_tokens)
    response = runtime.handle_request(asked)
    assert response is not None
    assert (len(response.token_ids), response.finish_reason) == (generated, FinishReason.LENGTH)
    assert asked.stream_channel is not None
    assert asked.stream_channel.finished
    assert_clean(runtime)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "needed"),
    [
        (CONTEXT, None, CONTEXT + 1),
        (CONTEXT, 1, CONTEXT + 1),
        (CONTEXT + 1, None, CONTEXT + 2),
        (CONTEXT + 1, 0, CONTEXT + 1),
        (CONTEXT - 1, 2, CONTEXT + 1),
        (1, CONTEXT, CONTEXT + 1),
        (5000, None, 5001),
    ],
)
def test_what_does_not_fit_is_refused_everywhere_with_both_numbers(
    prompt: int, max_tokens: int | None, needed: int
) -> None:
    runtime, backend = fake_runtime()
    execution = SteppedRequest.begin(runtime, ask("founder"), 1)
    assert execution is not None
    asked = request(prompt, max_tokens)
    for attempt in (
        lambda: runtime.preparation.validate(asked),
        lambda: runtime.handle_request(asked),
        lambda: SteppedRequest.begin(runtime, asked, 2),
        lambda: execution.admit(asked, 1, 2),
    ):
        with pytest.raises(ContextLengthError) as caught:
            attempt()
        assert (caught.value.needed, caught.value.available) == (needed, CONTEXT)
        for number in (prompt, CONTEXT):
            assert str(number) in str(caught.value)
    # Nothing was begun, so the channel is still the caller's.
    assert asked.stream_channel is not None
    assert not asked.stream_channel.attached
    assert backend.launches == 0
    execution.abort()
    assert_clean(runtime)
