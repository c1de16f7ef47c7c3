"""What a caller says: checked on the spot, named when wrong, split when several."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import pytest

from steppe.errors import InvalidRequestError, UnsupportedRequestError
from steppe.request import (
    FinishReason,
    LLMGenerationRequest,
    LLMGenerationResponse,
    SamplingParams,
    SequenceOutput,
    TokenLogprob,
    Usage,
)
from steppe.streaming import StreamChannel


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, 101, float("nan"), float("inf"), "1", None, True]),
        ("top_p", [0, -1, 1.01, float("nan"), "x"]),
        ("top_k", [-2, 1.5, "3", True, 2**31]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, -1, float("inf")]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1, 10**400]),
        ("seed", [-1, 2**64, 1.5]),
        ("max_tokens", [-1, 0, 1.5, "9"]),
        ("min_tokens", [-1, "x"]),
        ("stop", [[""], ["x" * 1025], ["x"] * 65, [1], 5]),
        ("stop_token_ids", [[-1], ["a"], "ab", 5, list(range(1025))]),
        ("ignore_eos", [1, "yes", None]),
        ("skip_special_tokens", [0]),
        ("include_stop", ["no"]),
        ("logprobs", [-1, 51, 1.5, True]),
        ("prompt_logprobs", [-1, 51]),
        ("n", [0, -1, 129, 1.0]),
        ("logit_bias", [[1], "x", dict.fromkeys(range(1025), 0)]),
    ],
)
def test_bad_sampling_parameters_are_named(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as error:
            SamplingParams(**{name: value})
        assert error.value.field == name
        assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("bias", [{"AI": -100}, {-1: 1}, {3: 1e308}, {3: "x"}, {1.5: 0}])
def test_a_bad_bias_is_named_by_its_key(bias: dict[Any, Any]) -> None:
    (key,) = bias
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(logit_bias=bias)
    assert error.value.field == f"logit_bias[{key!r}]"


def test_parameters_become_their_plain_form() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=-1,
        seed=np.int64(5),  # type: ignore[arg-type]
        stop="end",
        stop_token_ids=[3, 3, 4],
        logit_bias={},
    )
    assert (params.temperature, params.top_k, params.seed) == (0.5, 0, 5)
    assert type(params.seed) is int
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("end",), (3, 4), None)
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")
    with pytest.raises(FrozenInstanceError):
        params.top_p = 1.0  # type: ignore[misc]


def test_parameters_that_contradict_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        SamplingParams(max_tokens=0)
    assert SamplingParams(max_tokens=0, prompt_logprobs=1).max_tokens == 0


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False)])
def test_greedy_is_a_temperature_of_almost_nothing(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_ids_are_checked_against_a_vocabulary() -> None:
    params = SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[10])
    params.check_vocabulary(11)
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        params.check_vocabulary(10)
    with pytest.raises(InvalidRequestError, match=r"logit_bias\[9\]"):
        params.check_vocabulary(9)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user"}]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": b"bytes"}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"prompt": "x", "params": {"top_k": 3}}, "params"),
        ({"prompt": "x", "caller": 3}, "caller"),
        ({"prompt": "x", "cache_lookup": "sometimes"}, "cache_lookup"),
        ({"prompt": "x", "cache_commit": True}, "cache_commit"),
        ({"prompt": "x", "cache_salt": None}, "cache_salt"),
        ({"prompt": "x", "cache_salt": "s" * 257}, "cache_salt"),
        ({"prompt": "x", "priority": 2**31}, "priority"),
        ({"prompt": "x", "timeout": 0}, "timeout"),
        ({"prompt": "x", "queue_timeout": -1}, "queue_timeout"),
        ({"prompt": "x", "first_token_timeout": float("nan")}, "first_token_timeout"),
        ({"prompt": "x", "sequence_index": -1}, "sequence_index"),
        ({"prompt": "x", "task": "rerank"}, "task"),
        ({"prompt": "x", "task": "embed", "params": SamplingParams(n=2)}, "n"),
    ],
)
def test_bad_requests_are_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        LLMGenerationRequest(**arguments)
    assert error.value.field == field


def test_ids_of_any_integer_kind_are_a_prompt() -> None:
    request = LLMGenerationRequest(np.array([1, 2, 3]))  # type: ignore[arg-type]
    assert request.prompt == (1, 2, 3)
    assert LLMGenerationRequest("").prompt == "", "whether that is empty is the tokenizer's say"


def test_n_splits_into_copies_that_share_a_channel() -> None:
    channel = StreamChannel()
    request = LLMGenerationRequest(
        "x", params=SamplingParams(n=3, seed=1), stream_channel=channel, caller="me", timeout=2
    )
    parts = request.sequences()
    assert [part.sequence_index for part in parts] == [0, 1, 2]
    for part in parts:
        assert part.params == replace(request.params, n=1)
        assert part.stream_channel is channel
        assert (part.prompt, part.caller, part.timeout) == ("x", "me", 2)
    assert LLMGenerationRequest("x").sequences() == (LLMGenerationRequest("x"),)


def test_a_batch_is_its_members_in_order() -> None:
    one = LLMGenerationRequest("a")
    two = LLMGenerationRequest("b", params=SamplingParams(n=2))
    batch = LLMGenerationRequest.batch([one, two])
    assert [part.prompt for part in batch.sequences()] == ["a", "b", "b"]
    with pytest.raises(UnsupportedRequestError):
        batch.check_single()
    one.check_single()
    with pytest.raises(InvalidRequestError):
        LLMGenerationRequest.batch([])
    with pytest.raises(InvalidRequestError, match=r"requests\[1\]"):
        LLMGenerationRequest.batch([one, batch])
    with pytest.raises(InvalidRequestError, match="no prompt of its own"):
        LLMGenerationRequest("x", requests=(one,))


def test_a_channel_is_added_without_touching_anything_else() -> None:
    request = LLMGenerationRequest([1, 2], caller="me", task="embed")
    channel = StreamChannel()
    other = request.with_channel(channel)
    assert other.stream_channel is channel
    assert request.stream_channel is None
    assert other == request, "the channel is no part of what a request says"
    for one in fields(request):
        if one.name != "stream_channel":
            assert getattr(other, one.name) is getattr(request, one.name)


def test_a_response_speaks_for_its_first_sequence() -> None:
    logprobs = (TokenLogprob(7, -0.5, ((7, -0.5),)),)
    first = SequenceOutput(0, "a", (7,), FinishReason.STOP, logprobs=logprobs)
    second = SequenceOutput(1, "b", (8,), FinishReason.LENGTH)
    response = LLMGenerationResponse((first, second), Usage(1, 2))
    assert (response.text, response.token_ids, response.finish_reason) == (
        "a",
        (7,),
        FinishReason.STOP,
    )
    assert response.logprobs == logprobs
