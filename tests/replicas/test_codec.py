"""What crosses the socket comes out as it went in, and nonsense is refused."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe import errors
from steppe.client import ModelCard
from steppe.engine.activity import EngineActivity, LiveSequence, StepSummary
from steppe.engine.config import EngineHealth
from steppe.engine.metrics import EngineMetrics
from steppe.errors import InvalidRequestError, ReplicaError, SteppeError
from steppe.replicas.runners import codec
from steppe.replicas.vocabulary import RunnerStatus, TokenChunk
from steppe.request import (
    FinishReason,
    Guided,
    LLMGenerationRequest,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from steppe.stepping.cache_metrics import ContextCacheMetrics


def wired(value: Any) -> Any:
    """As it comes out of the socket."""
    return json.loads(json.dumps(value))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(-1, 50),
    seed=st.none() | st.integers(0, 2**64 - 1),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3),
    n=st.integers(1, 4),
    logprobs=st.none() | st.integers(0, 5),
    guided=st.none()
    | st.builds(Guided, regex=st.text(max_size=9), after=st.none() | st.just("</think>"))
    | st.builds(Guided, choice=st.lists(st.text(min_size=1), min_size=1, max_size=3))
    | st.just(Guided(json_object=True))
    | st.just(Guided(json_schema={"type": "object", "properties": {"é": {}}})),
)
REQUESTS = st.builds(
    LLMGenerationRequest,
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9) | st.text(),
    params=PARAMS,
    caller=st.text(max_size=4),
    priority=st.integers(-5, 5),
    timeout=st.none() | st.floats(0.1, 9),
)
LOGPROBS = st.builds(
    TokenLogprob,
    st.integers(0, 99),
    st.floats(max_value=0, allow_nan=False),
    st.lists(st.tuples(st.integers(0, 99), st.floats(-9, 0)), max_size=2).map(tuple),
)


@given(request=REQUESTS)
def test_a_request_comes_out_as_it_went_in(request: LLMGenerationRequest) -> None:
    assert codec.read_request(wired(codec.write_request(request))) == request


def test_every_field_of_a_request_has_its_way_across() -> None:
    names = {field.name for field in fields(LLMGenerationRequest)}
    assert names == {*codec.REQUEST_FIELDS, *codec.OWN_WAY}
    assert MISSING not in codec.REQUEST_FIELDS.values(), "each has a plain default"


def test_a_conversation_and_a_task_come_out_too() -> None:
    talk = [{"role": "user", "content": "hé \ud800"}]
    request = LLMGenerationRequest(messages=talk)
    assert codec.read_request(wired(codec.write_request(request))) == request
    request = LLMGenerationRequest([1], task="embed", sequence_index=3, queue_timeout=2.0)
    assert codec.read_request(wired(codec.write_request(request))) == request


@given(
    chunk=st.builds(
        TokenChunk,
        st.integers(0, 3),
        st.text(),
        st.lists(st.integers(0, 2**31)).map(tuple),
        st.none() | st.lists(LOGPROBS, max_size=3).map(tuple),
    )
)
def test_a_chunk_comes_out_as_it_went_in(chunk: TokenChunk) -> None:
    assert codec.read_chunk(wired(codec.write_chunk(chunk))) == chunk


@pytest.mark.parametrize("stop_reason", [None, "stop here", 7])
def test_a_last_chunk_comes_out_as_it_went_in(stop_reason: Any) -> None:
    last = TokenChunk(
        1,
        "end",
        (4,),
        (TokenLogprob(4, float("-inf")),),
        True,
        FinishReason.STOP,
        stop_reason,
        Usage(3, 2, 1),
        (None, TokenLogprob(1, -0.5, ((1, -0.5),))),
        (0.6, -0.8),
    )
    assert codec.read_chunk(wired(codec.write_chunk(last))) == last


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequestError("top_p", "is wrong"),
        errors.ContextLengthError("prompt", "is long", needed=9, available=8),
        errors.BackpressureError("backlog_full", "is full"),
        errors.EngineFailedError("is dead"),
        errors.DeadlineExceededError("queue", "late"),
        errors.RequestCancelledError("gone"),
        errors.CheckpointError("cut short"),
        errors.RateLimitedError("slow", retry_after=None),
        errors.UpstreamError("broken", status=503),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_out_as_it_went_in(error: SteppeError) -> None:
    found = codec.read_error(wired(codec.write_error(error)))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


def test_an_error_of_another_kind_is_told_as_one_of_ours() -> None:
    found = codec.read_error(codec.write_error(ZeroDivisionError("a bug")))
    assert type(found) is ReplicaError
    assert str(found) == "ZeroDivisionError: a bug"
    assert type(codec.read_error({"kind": "SystemExit", "message": "no"})) is ReplicaError
    with pytest.raises(TypeError, match="reason"):
        codec.read_error({"kind": "SubmitError", "message": "x", "reason": ["a"]})
    with pytest.raises(KeyError):
        codec.read_error({"kind": "SubmitError", "message": "x", "__class__": "y"})


def test_state_comes_out_as_it_went_in() -> None:
    status = RunnerStatus(EngineHealth(False, "stalled", 1, 2, 3.5, "slow"), EngineMetrics(5, 6))
    assert codec.read_status(wired(codec.write_status(status))) == status
    told = replace(status, cache=ContextCacheMetrics(*range(14)))
    assert codec.read_status(wired(codec.write_status(told))) == told
    step = StepSummary(4, 1.5, 0.25, ((1, 9),), (2, 3), (), ((2, 0.5),), 2, 0, 3, 7, 16)
    live = LiveSequence(2, 2, None, 0.5, 9, 1, None, False)
    activity = EngineActivity(9.5, (step,), (live,))
    assert codec.read_activity(wired(codec.write_activity(activity))) == activity
    card = ModelCard("m", 100, 9, 4, 8, True, {"temperature": 0.5}, 512)
    assert codec.read_card(wired(codec.write_card(card))) == card


@pytest.mark.parametrize(
    "chunk",
    [[], [0], [0, 5, []], ["0", "a", []], [0, "a", ["b"]], [0, "a", [1], None], [True, "a", []],
     [0, "", [], [[1]], None, None, None, None, None],
     [0, "", [], None, "whatever", None, None, None, None],
     [0, "", [], [None], None, None, None, None, None]],
)  # fmt: skip
def test_nonsense_is_no_chunk(chunk: list[Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        codec.read_chunk(chunk)


@pytest.mark.parametrize(
    "value",
    [None, [], {}, {"params": {}}, {"params": {"n": 0}, "prompt": [1]},
     {"params": {"unheard": 1}, "prompt": [1]}, {"params": {}, "prompt": [1], "extra": 2}],
)  # fmt: skip
def test_nonsense_is_no_request(value: Any) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)) as refused:
        codec.read_request(value)
    assert not isinstance(refused.value, SteppeError) or isinstance(
        refused.value, InvalidRequestError
    )
