"""The resident table: all of a commit or none of it. And the one way to end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from steppe.engine.channel import Bell, EngineChannel
from steppe.engine.coordinator import RequestCoordinator
from steppe.engine.record import Outcome, RequestRecord, SequenceRecord, TerminalStatus
from steppe.engine.terminate import completed, fail, fail_engine, terminate
from steppe.errors import ExecutionError, RequestCancelledError, RequestFailedError
from steppe.request import FinishReason, LLMGenerationResponse, SequenceOutput, Usage
from steppe.stepping.types import (
    BatchResult,
    ImmutableStepBatch,
    ResidentRef,
    SlotSeed,
    StepResult,
    TokenDelta,
)
from steppe.streaming import Finish, StreamChannel

from .helpers import ask

RESPONSE = LLMGenerationResponse((SequenceOutput(0, "x", (1,), FinishReason.STOP),), Usage(1, 1))


class Materializer:
    """As much of an execution as a commit asks for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.broken: set[int] = set()

    def materialize(self, result: BatchResult, stop_strings: Any) -> LLMGenerationResponse:
        self.asked.append(result.request_id)
        if result.request_id in self.broken:
            raise ValueError("broken")
        return RESPONSE


def seated(*slots: int) -> tuple[RequestCoordinator, list[SequenceRecord], Any]:
    shared = EngineChannel(8, 8)
    table, sequences = RequestCoordinator(), []
    for slot in slots:
        channel = StreamChannel()
        record = RequestRecord(slot + 1, ask().with_channel(channel), channel, shared, 0.0)
        table.add(record.sequences[0], ResidentRef(slot, 1))
        sequences.append(record.sequences[0])
    return table, sequences, Materializer()


def ended(slot: int, reason: FinishReason = FinishReason.STOP) -> tuple[ResidentRef, BatchResult]:
    return ResidentRef(slot, 1), BatchResult(slot + 1, slot, (1,), "x", reason)


def test_commit_retires_the_finished_and_keeps_the_rest() -> None:
    table, (first, second, third), execution = seated(0, 1, 2)
    delta, last = TokenDelta((5,)), TokenDelta((1,))
    commit = table.commit(
        StepResult(
            ok=True,
            deltas=((ResidentRef(0, 1), delta), (ResidentRef(1, 1), last)),
            finished=(ended(1), ended(2, FinishReason.CANCELLED)),
        ),
        execution,
    )
    assert commit.survivors == [(first, delta)]
    assert [one.sequence for one in commit.finished] == [second, third]
    assert [one.response for one in commit.finished] == [RESPONSE, None]
    assert commit.finished[0].delta is last
    assert execution.asked == [2], "the cancelled are not materialised"
    assert list(table) == [first]


def test_nobody_is_materialised_who_was_stopped_or_died() -> None:
    table, (first, _), execution = seated(0, 1)
    first.record.cancel()
    table.commit(StepResult(ok=True, finished=(ended(0), ended(1, FinishReason.ERROR))), execution)
    assert execution.asked == []
    assert len(table) == 0


@pytest.mark.parametrize(
    "result",
    [
        StepResult(ok=True, finished=(ended(0), ended(0))),
        StepResult(ok=True, finished=((ResidentRef(0, 2), ended(0)[1]),)),
        StepResult(ok=True, finished=(ended(0), ended(7))),
        StepResult(ok=True, finished=((ResidentRef(0, 1), ended(1)[1]),)),
        StepResult(ok=True, finished=(ended(0),), deltas=((ResidentRef(1, 9), TokenDelta((1,))),)),
        StepResult(ok=True, finished=(ended(0), ended(2))),
        StepResult(ok=True, preempted=((ResidentRef(1, 1), "seed"),)),  # type: ignore[arg-type]
    ],
)
def test_a_result_that_contradicts_the_table_changes_nothing(result: StepResult) -> None:
    table, sequences, execution = seated(0, 1, 2)
    execution.broken = {3}
    with pytest.raises((ExecutionError, ValueError)):
        table.commit(result, execution, ImmutableStepBatch())
    assert list(table) == sequences
    assert all(sequence.ref is not None for sequence in sequences)


def test_whoever_was_to_leave_must_have_left() -> None:
    table, _, execution = seated(0, 1)
    ref = ResidentRef(0, 1)
    with pytest.raises(ExecutionError, match="did not"):
        table.commit(
            StepResult(ok=True),
            execution,
            ImmutableStepBatch(retire=((ref, FinishReason.CANCELLED),)),
        )
    with pytest.raises(ExecutionError, match="preempted"):
        table.commit(StepResult(ok=True), execution, ImmutableStepBatch(preempt=(ref,)))


def test_the_preempted_take_their_seed_along() -> None:
    table, (first, second), execution = seated(0, 1)
    ref = ResidentRef(1, 1)
    seed = SlotSeed(2, 1, (1,), ask().params, 0, 4)
    commit = table.commit(
        StepResult(ok=True, preempted=((ref, seed),)), execution, ImmutableStepBatch(preempt=(ref,))
    )
    assert commit.preempted == [(second, seed)]
    assert (second.ref, second.resume) == (None, seed)
    assert list(table) == [first]


def test_seats_are_taken_once_and_by_somebody() -> None:
    table, (first,), _ = seated(0)
    with pytest.raises(ExecutionError, match="taken"):
        table.add(first, ResidentRef(0, 2))
    for nobody in (ResidentRef(), ResidentRef(3, 0)):
        with pytest.raises(ExecutionError, match="no seat"):
            table.add(first, nobody)
    assert table.clear() == [first]
    assert len(table) == 0


# ---- the one way to end --------------------------------------------------------------------------


def record(**fields: Any) -> RequestRecord:
    shared = EngineChannel(8, 8)
    request = ask(**fields)
    shared.reserve(request.params.n, 3 * request.params.n)
    channel = StreamChannel()
    one = RequestRecord(1, request.with_channel(channel), channel, shared, 0.0)
    channel.attach(one.cancel)
    shared.register(one)
    return one


def test_the_order_of_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    one = record()
    shared, steps = one.shared, []

    def spy(owner: object, name: str, label: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            steps.append(label)
            return real(*args, **kwargs)

        monkeypatch.setattr(type(owner), name, lambda self, *a, **k: call(*a, **k))

    spy(one.channel, "push", "chunk")
    spy(shared, "release", "places")
    spy(shared.counters, "add", "counter")
    spy(shared, "forget", "registry")
    spy(one, "publish", "outcome")
    spy(one.channel, "finish", "close")
    assert fail(one, "broken")
    assert steps == ["chunk", "places", "counter", "registry", "outcome", "close"]


def test_an_end_happens_once_whoever_comes() -> None:
    for _ in range(50):
        one = record()
        wins: list[bool] = []
        start = threading.Barrier(4)

        def end(one: RequestRecord = one, wins: list[bool] = wins, start: Any = start) -> None:
            start.wait()
            wins.append(fail(one, "broken"))

        threads = [threading.Thread(target=end) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(wins) == [False, False, False, True]
        assert one.shared.pending == 0
        assert one.shared.counters.snapshot().failed == 1


def test_a_planted_flag_wins_over_a_completion_and_a_failure() -> None:
    for wanted in (completed(RESPONSE), Outcome(TerminalStatus.EXECUTION_ERROR, error=None)):
        one = record()
        assert one.cancel()
        assert not one.cancel()
        last = (one.sequences[0], TokenDelta((1,)), Finish(FinishReason.STOP))
        assert terminate(one, wanted, last=last)
        assert one.shared.counters.snapshot().cancelled == 1
        assert one.channel.finish_reason is FinishReason.CANCELLED
        chunk = one.channel.try_pop()
        assert chunk is not None
        assert chunk.token_ids == ()
        with pytest.raises(RequestCancelledError):
            raise one.wait(0).error or AssertionError


def test_a_cancel_after_the_end_is_nothing() -> None:
    one = record()
    terminate(one, completed(RESPONSE), last=(one.sequences[0], None, Finish(FinishReason.STOP)))
    assert not one.cancel()
    assert not one.shared.cancel_record(1)
    assert one.wait(0).response is RESPONSE


def test_a_failed_engine_ends_everybody_and_refuses_the_rest() -> None:
    one = record(n=3)
    cause = ExecutionError("gone")
    fail_engine(one.shared, cause)
    fail_engine(one.shared, ValueError("later"))
    assert one.shared.failure is cause
    error = one.wait(0).error
    assert isinstance(error, RequestFailedError)
    assert error.__cause__ is cause
    assert one.shared.post_submit(one) == "failed"
    assert one.shared.pending == 0


def test_a_bell_rings_once_however_often_it_is_rung() -> None:
    bell = Bell()
    for _ in range(3):
        bell.ring()
    bell.wait()
    bell.wait(0.001)  # nothing left: this one times out
    bell.ring()
    bell.wait(0)
