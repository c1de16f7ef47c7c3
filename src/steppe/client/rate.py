"""How long somebody who was refused should wait: measured, not guessed."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ServiceRate"]


class ServiceRate:
    """How fast requests end, from samples of a counter that only rises. One thread."""

    WINDOW = 30.0
    """Seconds that a sample counts for."""
    SPACING = 0.1
    UNKNOWN = 1.0
    """Seconds to name while nothing was measured."""
    MOST = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()

    def observe(self, ended: int) -> None:
        """That many have ended so far."""
        now = self._clock()
        samples = self._samples
        if len(samples) > 1 and now - samples[-2][0] < self.SPACING:
            samples[-1] = (now, ended)
        else:
            samples.append((now, ended))
        while now - samples[0][0] > self.WINDOW:
            samples.popleft()

    def seconds_for(self, requests: float) -> float:
        """How long that many take at the measured rate; within [0.1, 60]."""
        if len(self._samples) < 2:
            return self.UNKNOWN
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        if last <= first:
            return self.UNKNOWN
        if after == before:
            return max(self.UNKNOWN, min(self.MOST, last - first))
        return max(0.1, min(self.MOST, requests * (last - first) / (after - before)))
