"""Time limits of requests and of steps, on a clock that stands still until told otherwise."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from steppe.engine import ShutdownMode
from steppe.errors import (
    DeadlineExceededError,
    EngineFailedError,
    ExecutionLostError,
    RequestCancelledError,
    RequestFailedError,
)
from steppe.request import FinishReason
from steppe.testing import FakeClock, Hold, LinearCost

from .helpers import ask, chunks, expected, run, tick

if TYPE_CHECKING:
    from .conftest import MakeEngine

BOTH = pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "seed"])


def expired(handle: Any, which: str) -> None:
    with pytest.raises(DeadlineExceededError, match=which) as error:
        handle.get(10)
    assert error.value.which == which


@BOTH
def test_a_waiter_whose_time_is_up_is_answered_and_never_runs(
    make_engine: MakeEngine, mixed: bool
) -> None:
    clock = FakeClock()
    engine, runtime = make_engine(mixed=mixed, capacity=1, config={"clock": clock})
    running = engine.submit(ask(20, queue_timeout=1.0))
    waiting = engine.submit(ask(5, queue_timeout=1.0))
    tick(engine)
    clock.advance(1.0)
    tick(engine)
    expired(waiting, "queue")
    assert engine.queued == 0
    run(engine)
    assert running.get().token_ids, "it was admitted in time"
    assert waiting.id not in runtime.attempts
    metrics = engine.metrics()
    assert (metrics.failed, metrics.expired, metrics.completed) == (1, 1, 1)


@BOTH
def test_a_total_limit_ends_a_running_request_at_the_next_boundary(
    make_engine: MakeEngine, mixed: bool
) -> None:
    clock = FakeClock()
    engine, runtime = make_engine(
        mixed=mixed, cost=LinearCost(clock, per_step=1.0), config={"clock": clock}
    )
    handle = engine.submit(ask(1000, timeout=5.5))
    other = engine.submit(ask(12))
    run(engine)
    expired(handle, "total")
    assert other.get().token_ids == expected(other.id, 12)
    assert runtime.decodes[handle.id] <= 6
    assert chunks(handle)[-1].finish_reason is FinishReason.ERROR


def test_the_first_token_limit_is_met_by_the_first_token(make_engine: MakeEngine) -> None:
    clock = FakeClock()
    engine, _ = make_engine(
        cost=LinearCost(clock, per_prompt_token=1.0),
        config={"clock": clock, "max_step_tokens": 4},
    )
    quick = engine.submit(ask(5, prompt=4, first_token_timeout=6.0))
    slow = engine.submit(ask(5, prompt=50, first_token_timeout=6.0))
    run(engine)
    assert quick.get().token_ids
    expired(slow, "first_token")


def test_a_cancel_before_the_limit_stays_a_cancel(make_engine: MakeEngine) -> None:
    clock = FakeClock()
    engine, _ = make_engine(config={"clock": clock})
    handle = engine.submit(ask(timeout=1.0))
    handle.cancel()
    clock.advance(5.0)
    run(engine)
    with pytest.raises(RequestCancelledError):
        handle.get()
    assert engine.metrics().expired == 0


def test_limits_of_requests_that_are_over_are_forgotten(make_engine: MakeEngine) -> None:
    clock = FakeClock()
    engine, _ = make_engine(config={"clock": clock})
    for _ in range(500):
        engine.submit(ask(1, timeout=1e6, queue_timeout=1e6))
        run(engine)
    assert len(engine._deadlines._heap) < 200


def test_callers_are_answered_while_a_step_hangs(make_engine: MakeEngine) -> None:
    clock, hold = FakeClock(), Hold()
    engine, _ = make_engine(
        manual=False,
        capacity=1,
        holds={2: hold},
        config={"clock": clock, "idle_wait": 0.001},
    )
    running = engine.submit(ask(9, timeout=50.0))
    waiting = engine.submit(ask(9, queue_timeout=1.0))
    assert hold.entered.wait(10)
    clock.advance(2.0)
    expired(waiting, "queue")
    clock.advance(50.0)
    expired(running, "total")
    assert not hold._released.is_set()
    hold.release()


def test_a_real_clock_needs_no_polling(make_engine: MakeEngine) -> None:
    hold = Hold()
    engine, _ = make_engine(manual=False, capacity=1, holds={1: hold})
    began = time.monotonic()
    handle = engine.submit(ask(9, timeout=0.02))
    expired(handle, "total")
    assert time.monotonic() - began >= 0.02
    hold.release()


def test_a_step_past_the_limit_turns_health_bad_and_then_fails_the_engine(
    make_engine: MakeEngine,
) -> None:
    clock, hold = FakeClock(), Hold()
    engine, runtime = make_engine(
        manual=False,
        capacity=1,
        holds={2: hold},
        config={"clock": clock, "hang_limit": 10.0, "idle_wait": 0.001},
    )
    running, waiting = engine.submit(ask(9)), engine.submit(ask(9))
    assert hold.entered.wait(10)
    clock.advance(9.0)
    health = engine.health()
    assert (health.ok, health.busy_for) == (True, 9.0)
    clock.advance(2.0)
    assert not engine.health().ok
    for handle in (running, waiting):
        with pytest.raises(RequestFailedError, match="more than") as error:
            handle.get(10)
        assert isinstance(error.value.__cause__, ExecutionLostError)
    with pytest.raises(EngineFailedError):
        engine.submit(ask())
    assert engine.health().state == "failed"
    assert engine.leaks() != [], "the stuck step still holds its seat"
    stopping = threading.Thread(target=engine.shutdown, args=(ShutdownMode.DRAIN,))
    stopping.start()
    stopping.join(10)
    assert not stopping.is_alive(), "shutdown does not wait for a step that may never return"
    hold.release()
    assert engine._thread is not None
    engine._thread.join(10)
    assert runtime.closed


def test_a_manual_engine_looks_at_its_clock_in_every_tick(make_engine: MakeEngine) -> None:
    clock = FakeClock()
    engine, _ = make_engine(capacity=1, config={"clock": clock, "hang_limit": 5.0})
    handle = engine.submit(ask(timeout=1.0))
    clock.advance(2.0)
    assert engine.tick()
    expired(handle, "total")
    assert engine._deadlines.thread is None
    assert engine.health().state == "running"
    engine.shutdown()
    assert engine.health().state == "stopped"
