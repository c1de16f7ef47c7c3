"""Responses of finished sequences."""

from __future__ import annotations

from steppe.request import FinishReason, TokenLogprob, Usage
from steppe.runtime.responses import to_response
from steppe.stepping.types import BatchResult


def test_every_field_of_a_result_reaches_the_caller() -> None:
    logprobs = (TokenLogprob(1, -0.5),)
    scores = (None, TokenLogprob(2, -0.25))
    done = BatchResult(
        9,
        4,
        (1,),
        "one",
        FinishReason.STOP,
        "stop",
        logprobs,
        scores,
        prompt_tokens=2,
        cached_tokens=1,
    )
    response = to_response([done])
    (output,) = response.outputs
    assert (output.index, output.text, output.token_ids) == (0, "one", (1,))
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "stop")
    assert (output.logprobs, output.prompt_logprobs) == (logprobs, scores)
    assert response.usage == Usage(2, 1, 1)


def test_usage_adds_up_unless_told() -> None:
    results = [
        BatchResult(1, index, (1,) * index, "", FinishReason.LENGTH, prompt_tokens=3)
        for index in range(3)
    ]
    assert to_response(results).usage == Usage(9, 3, 0)
    assert to_response(results, 3).usage == Usage(3, 3, 0)
    assert [output.index for output in to_response(results).outputs] == [0, 1, 2]
