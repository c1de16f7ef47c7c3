"""P23: a slow reader grew memory and slowed others. Nobody waits for a reader."""

from __future__ import annotations

from steppe.testing import FakeClock, LinearCost
from tests.engine.helpers import ask, chunks, run, tick

from .engines import scripted


def test_a_hundred_readers_who_never_read_change_nothing_for_who_does() -> None:
    def times(lazy: int) -> list[float]:
        clock = FakeClock()
        with scripted(
            capacity=128,
            cost=LinearCost(clock, per_step=0.01),
            config={"clock": clock, "command_queue_capacity": 128},
        ) as (engine, _):
            reader = engine.submit(ask(30))
            unread = [engine.submit(ask(300)) for _ in range(lazy)]
            seen = []
            while not reader.ready:
                tick(engine)
                seen += [clock() for _ in chunks(reader)]
            run(engine)
            for handle in unread:
                (chunk,) = chunks(handle)
                assert len(chunk.token_ids) == 300, "merged, not dropped"
            return seen

    assert times(100) == times(0)
