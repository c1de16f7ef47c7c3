"""The engine as its callers see it (seed 000), over scripted executions."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from steppe.engine import (
    EngineConfig,
    RequestEngine,
    RequestHandle,
    ShutdownMode,
)
from steppe.errors import (
    ConfigError,
    EngineFailedError,
    ExecutionError,
    ExecutionLostError,
    InvalidRequestError,
    RequestCancelledError,
    RequestFailedError,
    SubmitError,
    UnsupportedRequestError,
)
from steppe.request import FinishReason, LLMGenerationRequest
from steppe.stepping.types import AdmissionResult, AdmissionStatus
from steppe.streaming import StreamChannel
from steppe.testing import Hold, Script, ScriptedRuntime, assert_idle_clean

from .helpers import ask, chunks, expected, run, tick

if TYPE_CHECKING:
    from .conftest import MakeEngine

BOTH = pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "seed"])


@BOTH
@pytest.mark.parametrize("manual", [True, False], ids=["manual", "threaded"])
def test_a_request_gets_its_own_response(
    make_engine: MakeEngine, mixed: bool, manual: bool
) -> None:
    engine, _ = make_engine(mixed=mixed, manual=manual)
    handles = [engine.submit(ask(count)) for count in (3, 1, 7)]
    if manual:
        run(engine)
    for handle, count in zip(handles, (3, 1, 7), strict=True):
        response = handle.get(10)
        assert response.token_ids == expected(handle.id, count)
        assert response.finish_reason is FinishReason.LENGTH
        assert response.usage.prompt_tokens == 3
        assert response.usage.completion_tokens == count
        assert handle.get() is response


def test_ids_are_unique_rising_and_never_zero(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(config={"command_queue_capacity": 64})
    ids = [engine.submit(ask(n=n)).id for n in (1, 3, 1, 2, 1)]
    assert ids[0] == 1
    assert ids == sorted(set(ids))
    run(engine)


@BOTH
def test_streams_carry_exactly_the_response(make_engine: MakeEngine, mixed: bool) -> None:
    engine, _ = make_engine(mixed=mixed, capacity=3)
    handles = [engine.submit(ask(count, logprobs=0)) for count in (1, 2, 9, 4)]
    seen: list[list[Any]] = [[] for _ in handles]
    while engine.tick():
        for one, handle in zip(seen, handles, strict=True):
            one += chunks(handle)
    for one, handle in zip(seen, handles, strict=True):
        response = handle.get()
        assert "".join(chunk.text for chunk in one) == response.text
        assert sum((chunk.token_ids for chunk in one), ()) == response.token_ids
        assert sum((chunk.logprobs or () for chunk in one), ()) == response.logprobs
        assert [chunk.finished for chunk in one] == [False] * (len(one) - 1) + [True]
        assert one[-1].finish_reason is response.finish_reason
        assert one[-1].usage == response.usage


def test_a_joiner_gets_its_first_token_from_the_step_that_made_it(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(capacity=2)
    first = engine.submit(ask(20))
    tick(engine, 3)
    joiner = engine.submit(ask(20))
    tick(engine)
    assert chunks(joiner)[0].token_ids == expected(joiner.id, 1)
    assert not first.ready
    assert engine.metrics().admitted_mid_flight == 1


def test_one_seat_is_one_batch_after_another_in_order(make_engine: MakeEngine) -> None:
    engine, runtime = make_engine(capacity=1)
    handles = [engine.submit(ask(2)) for _ in range(5)]
    run(engine)
    founded = [line[1] for line in runtime.log if line[0] == "found"]
    assert founded == [handle.id for handle in handles]
    metrics = engine.metrics()
    assert (metrics.admitted_mid_flight, metrics.completed) == (0, 5)
    assert metrics.queue_latency_count == 5


# ---- refusals ------------------------------------------------------------------------------------


def test_several_prompts_are_refused_for_good_and_not_counted(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    with pytest.raises(UnsupportedRequestError):
        engine.submit(LLMGenerationRequest.batch([ask(), ask()]))
    with pytest.raises(UnsupportedRequestError, match="n: 128"):
        make_engine(config={"max_pending_requests": 5})[0].submit(ask(n=128))
    metrics = engine.metrics()
    assert (metrics.submitted, metrics.refused) == (0, 0)


def test_a_full_queue_refuses_and_a_drained_one_accepts(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(config={"command_queue_capacity": 3})
    for _ in range(4):
        engine.submit(ask())
    channel = StreamChannel()
    with pytest.raises(SubmitError) as refusal:
        engine.submit(ask(stream_channel=channel))
    assert refusal.value.reason == "queue_full"
    assert engine.metrics().refused == 1
    tick(engine)
    handle = engine.submit(ask(stream_channel=channel))
    assert handle.stream is channel, "a refusal does not use up the caller's channel"
    run(engine)
    assert handle.get().token_ids


def test_the_backlog_is_bounded_as_a_whole_and_n_counts_n(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(
        capacity=2, config={"max_pending_requests": 6, "command_queue_capacity": 2}
    )
    for _ in range(4):
        engine.submit(ask())
        tick(engine)  # each boundary makes room in the queue, not in the backlog
    with pytest.raises(SubmitError) as refusal:
        engine.submit(ask(n=6))
    assert refusal.value.reason == "backlog_full"
    run(engine)
    handle = engine.submit(ask(n=6))
    run(engine)
    assert len(handle.get().outputs) == 6


def test_a_used_channel_is_refused(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    channel = StreamChannel()
    engine.submit(ask(stream_channel=channel))
    with pytest.raises(InvalidRequestError) as error:
        engine.submit(ask(stream_channel=channel))
    assert error.value.field == "stream_channel"
    run(engine)


def test_what_can_never_fit_is_refused_with_the_arithmetic(make_engine: MakeEngine) -> None:
    engine, runtime = make_engine(manual=False, pages=69, page_size=16, context=4096)
    with pytest.raises(UnsupportedRequestError, match=r"1124 tokens need 71 pages .* has 69"):
        engine.submit(ask(24 + 100, prompt=1000))
    with pytest.raises(InvalidRequestError, match="4096"):
        engine.submit(ask(1, prompt=4096))
    assert engine.submit(ask(24, prompt=1000)).get(10).usage.completion_tokens == 24
    assert engine.metrics().submitted == 1
    assert runtime.attempts == {1: 1}


@BOTH
def test_refused_and_raising_founders_fail_alone(make_engine: MakeEngine, mixed: bool) -> None:
    def found(request_id: int) -> bool:
        if request_id == 2:
            raise ExecutionError("no such luck")
        return request_id != 1

    engine, _ = make_engine(mixed=mixed, found=found)
    refused, raised, served = (engine.submit(ask()) for _ in range(3))
    run(engine)
    with pytest.raises(RequestFailedError, match="refused"):
        refused.get()
    with pytest.raises(RequestFailedError, match="no such luck"):
        raised.get()
    assert served.get().token_ids
    metrics = engine.metrics()
    assert (metrics.failed, metrics.completed, metrics.queue_latency_count) == (2, 1, 3)


@BOTH
def test_no_capacity_keeps_the_head_and_counts_every_boundary(
    make_engine: MakeEngine, mixed: bool
) -> None:
    def refuse(request_id: int, attempt: int) -> AdmissionResult | None:
        if request_id == 2 and attempt <= 3:
            return AdmissionResult(AdmissionStatus.NO_CAPACITY, reason="full")
        return None

    engine, runtime = make_engine(mixed=mixed, refuse=refuse, capacity=3)
    handles = [engine.submit(ask(12)) for _ in range(3)]
    run(engine)
    assert engine.metrics().stalls_no_capacity == 3
    seated = [line[1] for line in runtime.log if line[0] in ("found", "admit")]
    assert seated == [1, 2, 3], "nobody overtakes"
    assert all(handle.get().token_ids for handle in handles)


@BOTH
def test_a_rejected_or_raising_admission_fails_only_that_head(
    make_engine: MakeEngine, mixed: bool
) -> None:
    def refuse(request_id: int, attempt: int) -> AdmissionResult | None:
        if request_id == 2:
            return AdmissionResult(AdmissionStatus.REJECTED, reason="not like this")
        if request_id == 3:
            raise ValueError("broken template")
        return None

    engine, _ = make_engine(mixed=mixed, refuse=refuse)
    good, rejected, raising, late = (engine.submit(ask(9)) for _ in range(4))
    run(engine)
    with pytest.raises(RequestFailedError, match="not like this"):
        rejected.get()
    with pytest.raises(RequestFailedError, match="broken template") as error:
        raising.get()
    assert isinstance(error.value.__cause__, ValueError)
    assert good.get().token_ids == expected(good.id, 9)
    assert late.get().token_ids == expected(late.id, 9)


# ---- cancel --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["handle", "id", "channel"])
def test_a_cancelled_waiter_is_never_executed(make_engine: MakeEngine, how: str) -> None:
    engine, runtime = make_engine(capacity=1)
    engine.submit(ask(5))
    waiting = engine.submit(ask(5))
    tick(engine)
    _cancel(engine, waiting, how)
    with pytest.raises(RequestCancelledError):
        waiting.get()
    assert not waiting.ready, "the actor has not looked yet"
    tick(engine)
    assert waiting.ready
    assert engine.queued == 0
    run(engine)
    assert waiting.id not in runtime.attempts
    assert waiting.stream.finish_reason is FinishReason.CANCELLED
    assert engine.metrics().queue_latency_count == 1


def _cancel(engine: RequestEngine, handle: RequestHandle, how: str) -> None:
    if how == "handle":
        handle.cancel()
    elif how == "id":
        engine.cancel(handle.id)
    else:
        handle.stream.cancel()


@BOTH
@pytest.mark.parametrize("how", ["handle", "id", "channel"])
def test_a_cancelled_resident_leaves_at_the_next_boundary(
    make_engine: MakeEngine, mixed: bool, how: str
) -> None:
    engine, runtime = make_engine(mixed=mixed, capacity=1)
    running = engine.submit(ask(1000))
    following = engine.submit(ask(2))
    tick(engine, 3)
    before = len(chunks(running)[0].token_ids)
    _cancel(engine, running, how)
    tick(engine)
    assert running.ready
    assert engine.metrics().cancelled == 1
    (last,) = chunks(running)
    assert last.finished
    assert last.token_ids == ()
    assert runtime.decodes[running.id] == before - 1
    run(engine)
    assert following.get().token_ids, "its seat went to the next"


def test_cancel_is_idempotent_and_late_or_unknown_ids_are_ignored(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    handle = engine.submit(ask(2))
    run(engine)
    engine.cancel(handle.id)
    engine.cancel(0)
    engine.cancel(999)
    handle.cancel()
    handle.stream.cancel()
    assert handle.get().token_ids == expected(handle.id, 2)
    assert engine.metrics().cancelled == 0


@BOTH
def test_cancel_wins_over_a_step_that_finished_the_sequence(
    make_engine: MakeEngine, mixed: bool
) -> None:
    hold = Hold()
    engine, _ = make_engine(mixed=mixed, manual=False, holds={1: hold})
    handle = engine.submit(ask(1))
    assert hold.entered.wait(10)
    handle.cancel()
    with pytest.raises(RequestCancelledError):
        handle.get()
    hold.release()
    assert_idle_clean(engine)
    assert engine.metrics().cancelled == 1
    assert chunks(handle)[-1].token_ids == ()


def test_get_of_a_cancelled_request_returns_while_its_step_is_still_open(
    make_engine: MakeEngine,
) -> None:
    hold = Hold()
    engine, runtime = make_engine(manual=False, holds={2: hold}, capacity=1)
    running, following = engine.submit(ask(50)), engine.submit(ask(1))
    assert hold.entered.wait(10)
    released = threading.Event()

    def wait() -> None:
        with pytest.raises(RequestCancelledError):
            running.get(10)
        released.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    engine.cancel(running.id)
    assert released.wait(10)
    waiter.join()
    hold.release()
    assert following.get(10).token_ids
    assert runtime.decodes == {running.id: 1}, "no token after the step in flight"


# ---- failure -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("how", ["raises", "not ok"])
def test_a_failed_step_ends_its_batch_and_not_the_engine(
    make_engine: MakeEngine, mixed: bool, how: str
) -> None:
    broken = {"fail_steps": {4: RuntimeError("device on fire")}}
    script: dict[str, Any] = broken if how == "raises" else {"bad_steps": frozenset([4])}
    engine, runtime = make_engine(mixed=mixed, capacity=2, **script)
    handles = [engine.submit(ask(8)) for _ in range(4)]
    run(engine)
    for handle in handles[:2]:
        with pytest.raises(RequestFailedError, match=r"device on fire|a step failed"):
            handle.get()
        assert handle.stream.finish_reason is FinishReason.ERROR
        assert chunks(handle)[-1].finished
    for handle in handles[2:]:
        assert handle.get().token_ids == expected(handle.id, 8)
    assert engine.health().ok
    assert runtime.leaks() == []


@BOTH
def test_a_fault_of_one_request_ends_that_request_alone(
    make_engine: MakeEngine, mixed: bool
) -> None:
    engine, _ = make_engine(mixed=mixed, fail_requests={2: 3})
    good, bad, other = (engine.submit(ask(6)) for _ in range(3))
    run(engine)
    with pytest.raises(RequestFailedError, match="scripted"):
        bad.get()
    for handle in (good, other):
        assert handle.get().token_ids == expected(handle.id, 6)


def test_a_response_that_cannot_be_made_fails_the_batch(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runtime = make_engine(capacity=2)
    handles = [engine.submit(ask(3)), engine.submit(ask(9))]
    tick(engine)
    assert runtime.execution is not None

    def broken(*_: object) -> None:
        raise ValueError("no tokenizer")

    monkeypatch.setattr(runtime.execution, "materialize", broken)
    run(engine)
    for handle in handles:
        with pytest.raises(RequestFailedError, match="no tokenizer"):
            handle.get()


def test_a_lost_execution_fails_the_engine_for_good(make_engine: MakeEngine) -> None:
    lost = ExecutionLostError("the device is gone")
    engine, runtime = make_engine(manual=False, fail_steps={3: lost}, capacity=1)
    handles = [engine.submit(ask(9)) for _ in range(3)]
    for handle in handles:
        with pytest.raises(RequestFailedError, match="the device is gone") as error:
            handle.get(10)
        assert error.value.__cause__ is lost
    assert_idle_clean(engine)
    health = engine.health()
    assert (health.ok, health.state) == (False, "failed")
    assert health.cause == "the device is gone"
    with pytest.raises(EngineFailedError) as refusal:
        engine.submit(ask())
    assert refusal.value.__cause__ is lost
    assert not engine.running
    assert runtime.closed


def test_an_interrupt_in_a_manual_tick_is_raised_and_strands_nobody(
    make_engine: MakeEngine,
) -> None:
    engine, runtime = make_engine(fail_steps={2: KeyboardInterrupt()}, capacity=1)
    handles = [engine.submit(ask()) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    for handle in handles:
        with pytest.raises(RequestFailedError):
            handle.get()
    assert not engine.tick()
    assert runtime.leaks() == []


def test_a_stopped_engine_lets_go_of_its_runtime() -> None:
    runtime = ScriptedRuntime()
    gone = weakref.ref(runtime)
    engine = RequestEngine(runtime)
    handle = engine.submit(ask(2))
    assert handle.get(10).token_ids
    engine.shutdown()
    del runtime
    gc.collect()
    assert gone() is None
    assert engine.leaks() == []


# ---- shutdown ------------------------------------------------------------------------------------


@BOTH
def test_drain_serves_everything_and_keeps_batching(make_engine: MakeEngine, mixed: bool) -> None:
    engine, runtime = make_engine(mixed=mixed, manual=False, capacity=4)
    handles = [engine.submit(ask(6)) for _ in range(20)]
    engine.shutdown(ShutdownMode.DRAIN)
    assert all(handle.ready for handle in handles)
    assert engine.metrics().completed == 20
    assert any(len(line[1]) == 4 for line in runtime.log if line[0] == "step")
    with pytest.raises(SubmitError) as refusal:
        engine.submit(ask())
    assert refusal.value.reason == "shutting_down"


def test_drain_admits_into_the_running_batch(make_engine: MakeEngine) -> None:
    engine, runtime = make_engine(capacity=2)
    for count in (9, 2, 2, 2):
        engine.submit(ask(count))
    tick(engine)
    engine.shutdown()
    assert runtime.begun == 1
    assert engine.metrics().admitted_mid_flight == 3


@BOTH
def test_cancel_shutdown_reaches_everyone(make_engine: MakeEngine, mixed: bool) -> None:
    hold = Hold()
    engine, _ = make_engine(
        mixed=mixed,
        manual=False,
        capacity=2,
        holds={5: hold},
        context=1 << 30,
        config={"command_queue_capacity": 2},
    )
    handles = [engine.submit(ask(10**6, prompt=1)) for _ in range(2)]
    assert hold.entered.wait(10)
    handles += [engine.submit(ask()) for _ in range(2)]  # and now the queue is full
    parked = [threading.Thread(target=handle.stream.consume, args=(id,)) for handle in handles]
    for thread in parked:
        thread.start()
    stopping = threading.Thread(target=engine.shutdown, args=(ShutdownMode.CANCEL,))
    stopping.start()
    hold.release()
    for thread in [*parked, stopping]:
        thread.join(10)
        assert not thread.is_alive()
    for handle in handles:
        with pytest.raises(RequestCancelledError):
            handle.get()
    assert engine.metrics().cancelled == 4


def test_the_first_mode_stands_and_everyone_waits_for_the_same_end(
    make_engine: MakeEngine,
) -> None:
    hold = Hold()
    engine, _ = make_engine(manual=False, holds={2: hold})
    handle = engine.submit(ask(5))
    assert hold.entered.wait(10)
    calls = [threading.Thread(target=engine.shutdown, args=(ShutdownMode.DRAIN,))]
    calls[0].start()
    while engine.running:
        pass
    calls += [
        threading.Thread(target=engine.shutdown, args=(ShutdownMode.CANCEL,)) for _ in range(4)
    ]
    for call in calls[1:]:
        call.start()
    assert all(call.is_alive() for call in calls)
    hold.release()
    for call in calls:
        call.join(10)
        assert not call.is_alive()
    assert handle.get().token_ids == expected(handle.id, 5)


def test_shutdown_from_the_actor_is_an_error_not_a_deadlock(make_engine: MakeEngine) -> None:
    errors: list[Exception] = []

    def length(_: int) -> int | None:
        try:
            engine.shutdown()
        except ExecutionError as error:
            errors.append(error)
        return None

    engine, _ = make_engine(manual=False, length=length)
    engine.submit(ask(1)).get(10)
    assert "cannot wait for itself" in str(errors[0])
    assert engine.running


def test_the_context_manager_drains_or_cancels() -> None:
    runtime = ScriptedRuntime()
    with RequestEngine(runtime, EngineConfig(max_batch_size=2)) as engine:
        kept = engine.submit(ask(5))
    assert kept.get().token_ids
    assert runtime.closed
    handles = []

    def leave_by_an_exception() -> None:
        with RequestEngine(ScriptedRuntime(Script(context=1 << 40))) as other:
            handles.append(other.submit(ask(1 << 39)))
            raise KeyError

    with pytest.raises(KeyError):
        leave_by_an_exception()
    with pytest.raises(RequestCancelledError):
        handles[0].get()


def test_a_handle_outlives_its_engine_and_does_not_keep_it() -> None:
    runtime = ScriptedRuntime(Script(context=1 << 40))
    engine = RequestEngine(runtime)
    handle = engine.submit(ask(1 << 39))
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    with pytest.raises(RequestCancelledError):
        handle.get(10)
    handle.cancel()
    assert handle.stream.cancelled


def test_an_interpreter_with_a_live_engine_ends() -> None:
    code = """
from steppe.engine import RequestEngine
from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.testing import Script, ScriptedRuntime
engine = RequestEngine(ScriptedRuntime(Script(context=1 << 40)))
handle = engine.submit(LLMGenerationRequest("x", params=SamplingParams(max_tokens=1 << 39)))
handle.stream.wait_pop(10)
print("bye")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True
    )
    assert (done.stdout, done.stderr) == ("bye\n", "")


# ---- handles -------------------------------------------------------------------------------------


def test_a_handle_moves_and_is_not_copied(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    handle = engine.submit(ask())
    assert handle.stream is handle.stream_shared()
    moved = handle.move()
    assert (handle.id, handle.valid, handle.ready) == (0, False, False)
    assert moved.valid
    handle.cancel()
    with pytest.raises(RuntimeError, match="moved"):
        handle.get()
    with pytest.raises(RuntimeError, match="moved"):
        _ = handle.stream
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            attempt(moved)
        with pytest.raises(TypeError):
            attempt(engine)
    run(engine)
    assert moved.get().token_ids
    assert not RequestHandle().valid


def test_get_with_a_timeout_and_ready_are_about_the_outcome(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    handle = engine.submit(ask(2))
    with pytest.raises(TimeoutError):
        handle.get(0.001)
    tick(engine)
    assert not handle.ready
    run(engine)
    assert handle.ready
    assert handle.stream.finished


def test_handle_request_answers_none_for_every_failure(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(manual=False, fail_requests={2: 1})
    response = engine.handle_request(ask(3))
    assert response is not None
    assert response.token_ids == expected(1, 3)
    assert engine.handle_request(ask(3)) is None
    assert engine.handle_request(LLMGenerationRequest.batch([ask()])) is None
    engine.shutdown()
    assert engine.handle_request(ask(3)) is None


# ---- n, tasks, metrics, configuration ------------------------------------------------------------


@BOTH
def test_n_sequences_are_one_request(make_engine: MakeEngine, mixed: bool) -> None:
    engine, runtime = make_engine(mixed=mixed, capacity=2, length=lambda one: 2 + one % 3)
    handle = engine.submit(ask(50, n=5))
    other = engine.submit(ask(3))
    assert other.id == handle.id + 5
    run(engine)
    response = handle.get()
    assert [output.index for output in response.outputs] == [0, 1, 2, 3, 4]
    for output in response.outputs:
        child = handle.id + output.index
        assert output.token_ids == expected(child, 2 + child % 3)
    assert response.usage.prompt_tokens == 3
    assert response.usage.completion_tokens == sum(len(one.token_ids) for one in response.outputs)
    found = chunks(handle)
    for index, output in enumerate(response.outputs):
        mine = [chunk for chunk in found if chunk.index == index]
        assert sum((chunk.token_ids for chunk in mine), ()) == output.token_ids
        assert [chunk.finished for chunk in mine].count(True) == 1
    assert [chunk.usage for chunk in found if chunk.usage] == [response.usage]
    assert engine.metrics().completed == 2
    assert runtime.attempts.keys() == set(range(1, 7))


def test_one_dead_sequence_ends_its_whole_request(make_engine: MakeEngine) -> None:
    engine, runtime = make_engine(capacity=2, fail_requests={2: 2})
    handle, other = engine.submit(ask(9, n=4)), engine.submit(ask(4))
    run(engine)
    with pytest.raises(RequestFailedError):
        handle.get()
    ends = [chunk for chunk in chunks(handle) if chunk.finished]
    assert sorted(chunk.index for chunk in ends) == [0, 1, 2, 3]
    assert {chunk.finish_reason for chunk in ends} == {FinishReason.ERROR}
    assert other.get().token_ids
    assert 4 not in runtime.attempts, "what was waiting never ran"
    metrics = engine.metrics()
    assert (metrics.failed, metrics.completed) == (1, 1)


@BOTH
def test_an_embedding_ends_with_its_prompt(make_engine: MakeEngine, mixed: bool) -> None:
    engine, runtime = make_engine(mixed=mixed, config={"max_step_tokens": 8})
    running = engine.submit(ask(9))
    handle = engine.submit(ask(None, prompt=20, task="embed"))
    run(engine)
    assert handle.get().token_ids == ()
    assert handle.get().finish_reason is FinishReason.STOP
    assert handle.get().usage.prompt_tokens == 20
    assert running.get().token_ids
    assert handle.id not in runtime.decodes


def test_metrics_account_for_every_request(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(capacity=2, fail_requests={3: 1})
    handles = [engine.submit(ask(4)) for _ in range(6)]
    handles[5].cancel()
    tick(engine)
    assert (engine.queued, engine.resident) == (3, 2)
    run(engine)
    metrics = engine.metrics()
    assert (metrics.submitted, metrics.completed) == (6, 4)
    assert (metrics.cancelled, metrics.failed) == (1, 1)
    assert metrics.queue_latency_count == 5
    assert metrics.queue_latency_total_us >= metrics.queue_latency_max_us >= 0
    assert metrics.tokens == 4 * 4 + 1
    assert (engine.queued, engine.resident) == (0, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("command_queue_capacity", 0),
        ("max_pending_requests", 0),
        ("max_batch_size", 0),
        ("max_batch_size", True),
        ("idle_wait", 0),
        ("idle_wait", -1.0),
        ("idle_wait", float("nan")),
        ("idle_wait", "1"),
        ("hang_limit", 0),
        ("max_step_tokens", 0),
        ("max_head_skips", -1),
        ("scheduling", "lifo"),
        ("overcommit", "yes"),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{name: value})  # type: ignore[arg-type]
    assert error.value.field == name


def test_a_runtime_must_be_able_to_serve_the_configuration() -> None:
    runtime = ScriptedRuntime(Script(capacity=2))
    with pytest.raises(ConfigError, match="more than the runtime's 2"):
        RequestEngine(runtime, EngineConfig(max_batch_size=3))
    runtime.supports_seated_admission = False
    with pytest.raises(ConfigError, match="nobody can join"):
        RequestEngine(runtime, EngineConfig(max_batch_size=2))
    RequestEngine(runtime).shutdown()
    runtime.world_size = 2
    with pytest.raises(ConfigError, match="2 ranks"):
        RequestEngine(runtime)


def test_only_the_actor_touches_the_runtime(make_engine: MakeEngine) -> None:
    engine, runtime = make_engine(manual=False)
    for _ in range(5):
        engine.submit(ask()).get(10)
    assert len(runtime.threads) == 1
    assert threading.get_ident() not in runtime.threads
    with pytest.raises(ExecutionError, match="own thread"):
        engine.tick()
