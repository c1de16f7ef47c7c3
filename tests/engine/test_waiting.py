"""Who is next: arrival order, fair order, bounded overtaking."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from steppe.engine.waiting import AGEING_SECONDS, FairWaiting, FcfsWaiting
from steppe.stepping.types import AdmissionResult, AdmissionStatus
from steppe.testing import FakeClock, LinearCost

from .helpers import ask, run, tick

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.testing import ScriptedRuntime

    from .conftest import MakeEngine

FULL = AdmissionResult(AdmissionStatus.NO_CAPACITY, reason="full")


def seated(runtime: ScriptedRuntime) -> list[object]:
    """Request ids in the order in which they were first seated."""
    return [line[1] for line in runtime.log if line[0] in ("found", "admit")]


def test_fcfs_never_lets_anyone_overtake(make_engine: MakeEngine) -> None:
    engine, runtime = make_engine(
        capacity=4, refuse=lambda one, attempt: FULL if one == 3 and attempt < 9 else None
    )
    for priority in (0, 0, 0, 99, 5):
        engine.submit(ask(30, priority=priority))
    run(engine)
    assert seated(runtime) == [1, 2, 3, 4, 5]
    assert engine.metrics().head_skips == 0
    assert engine.metrics().stalls_no_capacity == 8


@pytest.mark.parametrize("skips", [0, 1, 3])
def test_a_head_that_does_not_fit_is_passed_that_often_and_is_then_next(
    make_engine: MakeEngine, skips: int
) -> None:
    engine, runtime = make_engine(
        capacity=2,
        refuse=lambda one, attempt: FULL if one == 2 and attempt < 60 else None,
        config={"scheduling": "fair", "max_head_skips": skips},
    )
    engine.submit(ask(200))
    for _ in range(9):
        engine.submit(ask(2))
    run(engine)
    order = seated(runtime)
    assert order.index(2) == 1 + skips
    assert engine.metrics().head_skips == skips
    assert sorted(order) == list(range(1, 11))  # type: ignore[type-var]


def test_priority_decides_and_waiting_raises_it(make_engine: MakeEngine) -> None:
    clock = FakeClock()
    engine, runtime = make_engine(capacity=1, config={"scheduling": "fair", "clock": clock})
    engine.submit(ask(2))
    tick(engine)
    low = engine.submit(ask(2, priority=-1))
    engine.submit(ask(2, priority=1))
    run(engine)
    assert seated(runtime) == [1, 3, 2]

    engine.submit(ask(2))
    tick(engine)
    low = engine.submit(ask(2, priority=-1))
    tick(engine)
    clock.advance(2.5 * AGEING_SECONDS)
    engine.submit(ask(2, priority=1))
    run(engine)
    assert seated(runtime)[3:] == [4, 5, 6], "old enough to be as urgent as the newcomer"
    assert low.get().token_ids


def test_the_lowest_priority_does_not_starve(make_engine: MakeEngine) -> None:
    clock = FakeClock()
    engine, _ = make_engine(
        capacity=1,
        cost=LinearCost(clock, per_step=1.0),
        config={"scheduling": "fair", "clock": clock},
    )
    low = engine.submit(ask(2, priority=-(2**31)))
    for _ in range(1000):
        if low.ready:
            break
        if engine.queued < 4:
            engine.submit(ask(2, priority=2**31 - 1))
        engine.tick()
    assert low.ready
    run(engine)


def test_a_callers_own_backlog_delays_nobody_else(make_engine: MakeEngine) -> None:
    """P28: one request of B among 200 of A is served about as soon as among 20."""

    def place(backlog: int) -> int:
        engine, runtime = make_engine(
            capacity=4,
            config={
                "scheduling": "fair",
                "max_pending_requests": 512,
                "command_queue_capacity": 512,
            },
        )
        for _ in range(backlog):
            engine.submit(ask(8, caller="A"))
        tick(engine, 20)
        late = engine.submit(ask(8, caller="B"))
        run(engine)
        return seated(runtime).index(late.id)

    assert place(200) == place(40)


def test_callers_share_evenly_by_tokens_and_idling_earns_nothing(make_engine: MakeEngine) -> None:
    engine, runtime = make_engine(
        capacity=1,
        config={
            "scheduling": "fair",
            "max_pending_requests": 512,
            "command_queue_capacity": 512,
        },
    )
    for _ in range(60):
        engine.submit(ask(30, caller="long", prompt=1))
        engine.submit(ask(10, caller="short", prompt=1))
    served = {"long": 0, "short": 0}
    for count in range(900):
        engine.tick()
        if count == 600:
            for _ in range(20):
                engine.submit(ask(10, caller="late", prompt=1))
    for request_id, decodes in runtime.decodes.items():
        if request_id <= 120:
            served["long" if request_id % 2 else "short"] += decodes + 2
    assert 0.8 < served["long"] / served["short"] < 1.25
    late = sum(count for one, count in runtime.decodes.items() if one > 120)
    assert late < 200, "a newcomer gets its share, not arrears"
    run(engine)


def test_accounts_of_callers_who_left_are_dropped(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(capacity=2, config={"scheduling": "fair"}, fail_requests={3: 1})
    for number in range(30):
        handle = engine.submit(ask(3, caller=f"caller {number}"))
        if number % 3 == 0:
            handle.cancel()
        run(engine)
    assert engine._actor._waiting._accounts == {}  # type: ignore[attr-defined]


def test_n_is_seated_in_order_and_one_by_one(make_engine: MakeEngine) -> None:
    engine, runtime = make_engine(capacity=2)
    engine.submit(ask(3, n=3))
    engine.submit(ask(3))
    run(engine)
    assert seated(runtime) == [1, 2, 3, 4]


@dataclass
class FlaggedWhileRead:
    """A record that another thread stops between the first look at it and the second."""

    looks: int = 0
    live: bool = True

    @property
    def stopped(self) -> bool:
        self.looks += 1
        return self.looks > 1


@dataclass
class Stopped:
    """A record that was stopped long ago."""

    stopped: bool = True
    live: bool = False


@pytest.mark.parametrize("make", [FcfsWaiting, lambda: FairWaiting(8)], ids=["fcfs", "fair"])
def test_a_cancel_in_the_midst_of_the_sweep_loses_nobody(make: Callable[[], Any]) -> None:
    """It once took the request out of the line without ending it: its places were gone for good."""
    waiting = make()
    records: list[Any] = [FlaggedWhileRead(), Stopped(), FlaggedWhileRead(), Stopped()]
    sequences = [
        SimpleNamespace(record=record, request=ask(2), account=None, resume=None, skips=0)
        for record in records
    ]
    for sequence in sequences:
        waiting.append(sequence)
    first = waiting.remove_stopped()
    assert len(first) + len(waiting) == len(sequences)
    second = waiting.remove_stopped()
    assert len(waiting) == 0
    assert {id(one) for one in (*first, *second)} == {id(one) for one in sequences}
