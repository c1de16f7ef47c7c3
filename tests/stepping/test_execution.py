"""The seven methods of the seed, what is built on them, and the scripted execution's own rules."""

from __future__ import annotations

from typing import Any

import pytest

from steppe.engine import EngineConfig, RequestEngine
from steppe.errors import ExecutionError
from steppe.request import (
    FinishReason,
    LLMGenerationRequest,
    LLMGenerationResponse,
    SamplingParams,
    SequenceOutput,
    Usage,
)
from steppe.stepping.execution import SteppedExecution
from steppe.stepping.types import (
    AdmissionResult,
    AdmissionStatus,
    BatchResult,
    DecodeEntry,
    ImmutableDecodeBatch,
    ImmutablePrefillBatch,
    ImmutableStepBatch,
    PrefillEntry,
    ResidentRef,
    StepResult,
    TokenDelta,
)
from steppe.streaming import StreamChannel
from steppe.testing import Script, ScriptedRuntime, assert_idle_clean


class Seven(SteppedExecution):
    """Nothing but the seed: three tokens for everybody, the last of them in the snapshot alone."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.seats: dict[ResidentRef, tuple[int, LLMGenerationRequest, list[int]]] = {}
        self.count = 0

    def seat(self, request: LLMGenerationRequest, request_id: int) -> ResidentRef:
        self.count += 1
        ref = ResidentRef(self.count, 1)
        self.seats[ref] = (request_id, request, [])
        return ref

    def residents(self) -> list[ResidentRef]:
        return list(self.seats)

    def admit(  # type: ignore[override]
        self, request: LLMGenerationRequest, original_index: int, request_id: int
    ) -> AdmissionResult:
        self.calls.append(("admit", request_id, original_index))
        return AdmissionResult(AdmissionStatus.ADMITTED, self.seat(request, request_id))

    def prefill(self, batch: ImmutablePrefillBatch) -> StepResult:
        self.calls.append(("prefill", self.seats[batch.target][0]))
        return self.run([batch.target])

    def decode(self, batch: ImmutableDecodeBatch) -> StepResult:
        assert list(batch.residents) == self.residents()
        self.calls.append(("decode", tuple(self.seats[ref][0] for ref in batch.residents)))
        return self.run(list(batch.residents))

    def run(self, refs: list[ResidentRef]) -> StepResult:
        deltas, finished = [], []
        for ref in refs:
            request_id, request, ids = self.seats[ref]
            assert request.stream_channel is not None
            reason = None
            if request.stream_channel.cancelled:
                reason = FinishReason.CANCELLED
            else:
                ids.append(len(ids) + 10)
                if len(ids) == 3:
                    reason = FinishReason.STOP
            if reason is None:
                deltas.append((ref, TokenDelta((ids[-1],), f"{ids[-1]} ")))
            else:
                text = "".join(f"{one} " for one in ids)
                finished.append((ref, BatchResult(request_id, 0, tuple(ids), text, reason)))
                del self.seats[ref]
        return StepResult(ok=True, deltas=tuple(deltas), finished=tuple(finished))

    def materialize(self, result: BatchResult, stop_strings: Any) -> LLMGenerationResponse:
        output = SequenceOutput(0, result.text, result.token_ids, result.finish_reason)
        return LLMGenerationResponse((output,), Usage(1, len(result.token_ids)))

    def finish(self) -> None:
        self.calls.append("finish")

    def abort(self) -> None:
        self.calls.append("abort")


def ask() -> LLMGenerationRequest:
    return LLMGenerationRequest("x", params=SamplingParams(), stream_channel=StreamChannel())


def test_the_seven_methods_are_driven_in_the_seeds_order() -> None:
    made: list[Seven] = []

    def begin(request: LLMGenerationRequest, request_id: int) -> Seven:
        made.append(Seven())
        made[-1].seat(request, request_id)
        return made[-1]

    engine = RequestEngine.from_factory(begin, EngineConfig(max_batch_size=2), manual=True)
    handles = [engine.submit(ask()) for _ in range(3)]
    while engine.tick():
        pass
    assert [execution.calls for execution in made] == [
        [
            ("prefill", 1),
            ("admit", 2, 1),
            ("prefill", 2),
            ("decode", (1, 2)),
            ("decode", (1, 2)),
            "finish",
        ],
        # A batch whose last resident has just left takes nobody in: the next in line founds anew.
        [("prefill", 3), ("decode", (3,)), ("decode", (3,)), "finish"],
    ]
    for handle in handles:
        assert handle.get().token_ids == (10, 11, 12)
        chunk = handle.stream.try_pop()
        assert chunk is not None
        assert chunk.text == handle.get().text, "the tail comes from the snapshot"
        assert chunk.token_ids == (10, 11, 12)
    assert_idle_clean(engine)


def test_a_cancel_reaches_the_seven_through_their_channel() -> None:
    execution = Seven()

    def begin(request: LLMGenerationRequest, request_id: int) -> Seven:
        execution.seat(request, request_id)
        return execution

    engine = RequestEngine.from_factory(begin, manual=True)
    handle = engine.submit(LLMGenerationRequest("x", timeout=1e9))
    engine.tick()
    handle.cancel()
    while engine.tick():
        pass
    assert execution.calls == [("prefill", 1), ("decode", (1,)), "finish"]
    assert handle.stream.finish_reason is FinishReason.CANCELLED
    assert_idle_clean(engine)


class WithChannels(Seven):
    def channel(self, ref: ResidentRef) -> StreamChannel | None:
        return self.seats[ref][1].stream_channel


def test_the_default_step_is_made_of_the_seven() -> None:
    execution = WithChannels()
    one, two = execution.seat(ask(), 1), execution.seat(ask(), 2)
    batch = ImmutableStepBatch(prefills=(PrefillEntry(two, 1),))
    assert [ref for ref, _ in execution.step(batch).deltas] == [two]
    retire = ImmutableStepBatch(
        decodes=(DecodeEntry(two),), retire=((one, FinishReason.CANCELLED),)
    )
    result = execution.step(retire)
    assert [(ref, done.finish_reason) for ref, done in result.finished] == [
        (one, FinishReason.CANCELLED)
    ]
    assert execution.residents() == [two]
    with pytest.raises(ExecutionError, match="preempt"):
        execution.step(ImmutableStepBatch(preempt=(two,)))
    assert execution.snapshot() is None
    blind = Seven()
    ref = blind.seat(ask(), 1)
    with pytest.raises(ExecutionError, match="retire"):
        blind.step(ImmutableStepBatch(retire=((ref, FinishReason.CANCELLED),)))


# ---- the scripted execution ----------------------------------------------------------------------


def open_batch(**script: Any) -> Any:
    runtime = ScriptedRuntime(Script(**script))
    request = LLMGenerationRequest([1, 2, 3], params=SamplingParams(max_tokens=2))
    return runtime, runtime.begin_stepped(request, 1), request


def test_the_ordering_rules_bind_prefill_and_decode() -> None:
    _, execution, request = open_batch(mixed=False)
    (founder,) = execution.residents()
    with pytest.raises(ExecutionError, match="must prefill"):
        execution.decode(ImmutableDecodeBatch((founder,)))
    with pytest.raises(ExecutionError, match="not prefilled"):
        execution.admit(request, 1, 2)
    execution.prefill(ImmutablePrefillBatch(founder))
    joiner = execution.admit(request, 1, 2).ref
    with pytest.raises(ExecutionError, match="must prefill now"):
        execution.prefill(ImmutablePrefillBatch(founder))
    execution.prefill(ImmutablePrefillBatch(joiner))
    with pytest.raises(ExecutionError, match="every resident"):
        execution.decode(ImmutableDecodeBatch((founder,)))
    with pytest.raises(ExecutionError, match="every resident"):
        execution.decode(ImmutableDecodeBatch((joiner, founder)))
    assert execution.decode(ImmutableDecodeBatch((founder, joiner))).ok
    execution.finish()


def test_a_refused_admission_changes_nothing() -> None:
    runtime, execution, request = open_batch(capacity=2, pages=3, page_size=4)

    def state() -> Any:
        return runtime.free_pages, execution.residents(), execution.snapshot()

    before = state()
    large = LLMGenerationRequest([1] * 9, params=SamplingParams(max_tokens=2))
    assert execution.admit(large, 1, 2).status is AdmissionStatus.NO_CAPACITY
    assert state() == before
    for index, request_id in ((0, 2), (1, 1), (1, 0)):
        with pytest.raises(ExecutionError):
            execution.admit(request, index, request_id)
        assert state() == before
    execution.abort()
    execution.abort()
    assert runtime.leaks() == []
    assert runtime.ended == 1


def test_a_batch_no_planner_should_make_is_an_error() -> None:
    _, execution, _ = open_batch()
    (ref,) = execution.residents()
    for batch in (
        ImmutableStepBatch(decodes=(DecodeEntry(ref),)),
        ImmutableStepBatch(prefills=(PrefillEntry(ref, 4),)),
        ImmutableStepBatch(prefills=(PrefillEntry(ref, 0),)),
        ImmutableStepBatch(preempt=(ResidentRef(0, 9),)),
    ):
        with pytest.raises(ExecutionError):
            execution.step(batch)
    with pytest.raises(ExecutionError, match="still resident"):
        execution.finish()


def test_the_pool_of_a_script_runs_dry() -> None:
    runtime = ScriptedRuntime(Script(pages=1, page_size=4, overcommit=True))
    request = LLMGenerationRequest([1, 2, 3], params=SamplingParams(max_tokens=9))
    execution = runtime.begin_stepped(request, 1)
    assert execution is not None
    (ref,) = execution.residents()
    execution.step(ImmutableStepBatch(prefills=(PrefillEntry(ref, 3),)))
    execution.step(ImmutableStepBatch(decodes=(DecodeEntry(ref),)))
    with pytest.raises(ExecutionError, match="dry"):
        execution.step(ImmutableStepBatch(decodes=(DecodeEntry(ref),)))
    execution.abort()
    assert runtime.leaks() == []
