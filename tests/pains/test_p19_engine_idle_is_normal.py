"""P19: start-up raced the first request. An engine may idle for as long as it likes."""

from __future__ import annotations

from steppe.testing import FakeClock
from tests.engine.helpers import ask, expected, run

from .engines import scripted


def test_submit_before_the_first_tick_and_after_minutes_of_nothing() -> None:
    clock = FakeClock()
    with scripted(config={"clock": clock, "hang_limit": 1.0}) as (engine, _):
        early = engine.submit(ask(2))
        run(engine)
        for _ in range(600):
            clock.advance(1.0)
            assert not engine.tick()
        assert engine.health().ok
        late = engine.submit(ask(2))
        run(engine)
        for handle in (early, late):
            assert handle.get().token_ids == expected(handle.id, 2)
