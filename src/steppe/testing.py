"""Seams for tests of anything that embeds an engine: no weights, no waiting, no luck. For
coroutines that wait, ``virtually(main)`` runs them in time that passes only when all wait.

clock = FakeClock()
runtime = ScriptedRuntime(Script(capacity=4))
engine = RequestEngine.from_factory(
    runtime.begin_stepped, EngineConfig(max_batch_size=4, clock=clock), manual=True
)
handle = engine.submit(LLMGenerationRequest("hello", params=SamplingParams(max_tokens=3)))
while engine.tick():
    pass
assert len(handle.get().token_ids) == 3
assert_idle_clean(engine)
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import TYPE_CHECKING, Any, TypeVar

from steppe.stepping.script import (
    FakeClock,
    Hold,
    LinearCost,
    Script,
    StepCost,
    scripted_token,
)
from steppe.stepping.scripted import ScriptedExecution
from steppe.stepping.simulated import ScriptedRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from steppe.engine.request_engine import RequestEngine

__all__ = [
    "FakeClock",
    "Hold",
    "LinearCost",
    "Script",
    "ScriptedExecution",
    "ScriptedRuntime",
    "StepCost",
    "VirtualLoop",
    "assert_idle_clean",
    "scripted_token",
    "virtually",
]

T = TypeVar("T")


def assert_idle_clean(engine: RequestEngine, timeout: float = 5.0) -> None:
    """Assert that an engine at rest holds nothing: no record, no place, no seat, and whatever its
    runtime's ``leaks()`` reports; and that every accepted request is counted as one outcome.

    The last outcome is known an instant before its seat is free, so an engine with a thread is
    given ``timeout`` seconds (of real time) to come to rest.
    """
    end = time.monotonic() + timeout
    while (leaks := engine.leaks()) and time.monotonic() < end and not engine.manual:
        time.sleep(0.001)
    assert not leaks, "; ".join(leaks)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that jumps to the next timer instead of waiting for it, so that hours take no time.

    When everybody waits and no timer is left, nothing would ever happen: AssertionError.
    """

    def __init__(self) -> None:
        selector = _Skipping()
        super().__init__(selector)
        selector.loop = self
        self.now = 0.0

    def time(self) -> float:
        """The virtual time, in seconds."""
        return self.now


class _Skipping(selectors.SelectSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits for nothing"
        # A timer's time less the clock, rounded, may fall short of the timer.
        self.loop.now += timeout * (1 + 1e-12)
        return super().select(0)


def virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in virtual time. Tasks that it leaves behind are cancelled."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(loop))
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
