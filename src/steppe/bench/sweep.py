"""The highest rate that a server sustains, found by doubling and then by halving the interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from steppe.bench.stats import Summary

__all__ = ["Sweep", "sustained", "sweep"]

MOST_DRIFT = 0.10
LEAST_GOOD = 0.90
MOST_DOUBLINGS = 12


@dataclass(frozen=True, slots=True)
class Sweep:
    """Every rate that was tried, in rising order, and between which two the saturation lies.

    ``sustained`` is the highest rate that was kept up, None if none was; ``exceeded`` the lowest
    that was not, None if none was found.
    """

    runs: tuple[tuple[float, Summary], ...]
    sustained: float | None
    exceeded: float | None


def sustained(summary: Summary) -> bool:
    """Whether a server kept up with a run: no request failed, answers did not take longer and
    longer (a drift of at most 0.1), and nine of ten met the objectives.
    """
    return not summary.errors and summary.drift <= MOST_DRIFT and summary.good >= LEAST_GOOD


async def sweep(
    measure: Callable[[float], Awaitable[Summary]], start: float, *, rounds: int = 4
) -> Sweep:
    """Measure at ``start`` requests a second, then at rates that close in on the saturation.

    Doubles while a rate is sustained (halves while none is), then tries the geometric middle
    ``rounds`` times. Raises ConfigError for a start that is no rate.
    """
    if not (math.isfinite(start) and start > 0):
        raise ConfigError("rate", f"a sweep cannot start at {start!r}")
    runs: dict[float, Summary] = {}
    low: float | None = None
    high: float | None = None
    rate = start
    for _ in range(MOST_DOUBLINGS + 1):
        runs[rate] = summary = await measure(rate)
        if sustained(summary):
            low, rate = rate, rate * 2
        else:
            high, rate = rate, rate / 2
        if low is not None and high is not None:
            break
    for _ in range(rounds):
        if low is None or high is None:
            break
        rate = math.sqrt(low * high)
        runs[rate] = summary = await measure(rate)
        if sustained(summary):
            low = rate
        else:
            high = rate
    return Sweep(tuple(sorted(runs.items(), key=lambda run: run[0])), low, high)
