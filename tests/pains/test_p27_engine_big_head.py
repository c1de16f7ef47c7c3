"""P27: one big request that waited for memory held up all the small ones behind it."""

from __future__ import annotations

from typing import Any

from steppe.testing import FakeClock, LinearCost
from tests.engine.helpers import ask, run

from .engines import scripted


def waits(scheduling: str) -> tuple[float, list[float]]:
    """When the big one was done, and when each small one was."""
    clock = FakeClock()
    config: dict[str, Any] = {"scheduling": scheduling, "clock": clock, "max_head_skips": 4}
    with scripted(
        capacity=8,
        pages=100,
        page_size=16,
        cost=LinearCost(clock, per_step=1.0),
        config=config,
    ) as (engine, _):
        engine.submit(ask(600, prompt=400))  # holds most of the pool for a long time
        big = engine.submit(ask(100, prompt=1000))
        small = [engine.submit(ask(10, prompt=50)) for _ in range(8)]
        done: dict[int, float] = {}
        while engine.tick():
            for handle in (big, *small):
                if handle.ready:
                    done.setdefault(handle.id, clock())
        run(engine)
        return done[big.id], [done[handle.id] for handle in small]


def test_small_ones_pass_a_bounded_number_of_times() -> None:
    strict_big, strict_small = waits("fcfs")
    fair_big, fair_small = waits("fair")
    assert min(strict_small) > 600, "strict order holds everybody up"
    passed = [when for when in fair_small if when < 100]
    assert len(passed) == 4, "as many as may pass, and no more"
    assert fair_big <= strict_big + 40, "and the big one hardly notices"
