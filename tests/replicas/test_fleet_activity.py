"""Steps and seats of several engines, told as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from steppe.engine.activity import EngineActivity, LiveSequence, StepSummary
from steppe.replicas.fleet_activity import FleetActivity
from steppe.testing import VirtualLoop, virtually

STEP = StepSummary(1, 0.0, 0.1, (), (1,), (), (), 1, 0, 1)


class Engine:
    """As much of a replica as is looked at."""

    def __init__(self, name: str, begins: float) -> None:
        self.name = name
        self.generation = 1
        self.seats = 4
        self.steps = [replace(STEP, number=n, began=begins + n) for n in (1, 2)]
        self.live = (LiveSequence(1, 1, 2, 0.0, 3, 0, None, False),
                     LiveSequence(2, 2, None, 0.0, 3, 0, None, False))  # fmt: skip
        self.asked: list[int] = []

    async def activity(self, after: int = 0) -> EngineActivity:
        self.asked.append(after)
        steps = tuple(step for step in self.steps if step.number > after)
        return EngineActivity(10.0, steps, self.live)


def test_steps_are_numbered_as_they_began_and_seats_are_side_by_side() -> None:
    async def main(_: VirtualLoop) -> None:
        engines: list[Any] = [Engine("a", 0.0), Engine("b", 0.5)]
        fleet = FleetActivity()
        found = await fleet.look(engines, 0)
        assert [(one.number, one.began) for one in found.steps] == [
            (1, 1.0), (2, 1.5), (3, 2.0), (4, 2.5),
        ]  # fmt: skip
        assert [one.seat for one in found.live] == [2, None, 6, None]
        assert found.now == 10.0

        again = await fleet.look(engines, 3)
        assert [one.number for one in again.steps] == [4]
        assert engines[0].asked == [0, 2]

        # A new engine behind the same name begins at 1 again.
        engines[0].generation = 2
        engines[0].steps = [replace(STEP, number=1, began=9.0)]
        third = await fleet.look(engines, 4)
        assert [(one.number, one.began) for one in third.steps] == [(5, 9.0)]
        assert (await fleet.look([], 0)).now == 0.0

    virtually(main)
