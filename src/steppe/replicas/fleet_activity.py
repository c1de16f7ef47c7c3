"""What several engines are doing, told as if they were one."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from steppe.engine.activity import EngineActivity, StepLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.engine.activity import StepSummary
    from steppe.replicas.engine_core import EngineCoreActor

__all__ = ["FleetActivity"]


class FleetActivity:
    """Numbers the steps of all engines in the order in which they were learned of, and puts the
    seats of all side by side. One event loop.
    """

    def __init__(self) -> None:
        self._steps: deque[StepSummary] = deque(maxlen=StepLog.CAPACITY)
        self._last = 0
        self._known: dict[tuple[str, int], int] = {}
        """The last step known of each engine: of a replica, in one of its generations."""
        self._replicas = 0
        self._begun: dict[str, StepSummary] = {}
        """The last step of each replica."""

    async def look(self, replicas: Sequence[EngineCoreActor], after: int) -> EngineActivity:
        """All of them now, and the steps after that number."""
        ages = [(one.name, one.generation) for one in replicas]
        found = await asyncio.gather(
            *(
                one.activity(self._known.get(age, 0))
                for one, age in zip(replicas, ages, strict=True)
            )
        )
        new = []
        live = []
        first_seat = 0
        for replica, age, activity in zip(replicas, ages, found, strict=True):
            # Two looks at once may both bring a step.
            known = self._known.get(age, 0)
            new += [(age[0], step) for step in activity.steps if step.number > known]
            if activity.steps:
                self._known[age] = max(known, activity.steps[-1].number)
            live += [
                one if one.seat is None else replace(one, seat=first_seat + one.seat)
                for one in activity.live
            ]
            first_seat += replica.seats
        self._known = {age: self._known[age] for age in ages if age in self._known}
        names = {name for name, _ in ages}
        self._replicas = len(names)
        self._begun = {name: step for name, step in self._begun.items() if name in names}
        for name, step in sorted(new, key=lambda one: one[1].began):
            self._last += 1
            self._begun[name] = step
            self._steps.append(self._of_all(step))
        now = max((one.now for one in found), default=0.0)
        steps = tuple([step for step in self._steps if step.number > after])
        return EngineActivity(now, steps, tuple(live))

    def _of_all(self, step: StepSummary) -> StepSummary:
        """A step of one engine, with who was where in all of them when it began."""
        every = self._begun.values()
        free = [one.free_pages for one in every if one.free_pages is not None]
        return replace(
            step,
            number=self._last,
            queued=sum(one.queued for one in every),
            resident=sum(one.resident for one in every),
            free_pages=sum(free) if len(free) == self._replicas else None,
        )
