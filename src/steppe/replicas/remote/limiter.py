"""Token buckets: no more requests and tokens a minute than a server allows.

Written here because a bucket must take back what an answer turned out not to use, and slow down
when the server says so; the libraries there are count only what went through.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from steppe.errors import RateLimitedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RateLimiter"]

SLOWEST = 1 / 16
"""What is left of a rate after the server has asked to slow down again and again."""
RECOVERY = 60.0
"""Seconds in which a slowed rate doubles."""


class Bucket:
    """Fills at ``rate`` a second up to ``size``. May be overdrawn: what is asked beyond its size
    waits until it is full, and leaves it in debt.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self.size = per_minute
        self.level = per_minute
        self._rate = per_minute / 60.0
        self._slowed = 1.0
        self._seen = now

    def fill(self, now: float) -> None:
        passed = now - self._seen
        self._seen = now
        slow = min(passed, RECOVERY * -math.log2(self._slowed))
        recovered = self._slowed * 2.0 ** (slow / RECOVERY)
        # The rate grew exponentially while it was slow: what came in is its integral.
        effective = (recovered - self._slowed) * RECOVERY / math.log(2) + passed - slow
        self.level = min(self.size, self.level + effective * self._rate)
        self._slowed = min(1.0, recovered)

    def wait_for(self, amount: float) -> float:
        """Seconds until that much may be taken, at the most: a slow rate grows meanwhile."""
        missing = min(amount, self.size) - self.level
        return max(0.0, missing / (self._rate * self._slowed))

    def slow_down(self) -> None:
        self._slowed = max(SLOWEST, self._slowed / 2)
        self.level = min(self.level, 0.0)


class RateLimiter:
    """Bounds on requests and on tokens a minute; None is no bound. One event loop.

    Those who wait go in the order in which they came. In any minute no more goes through than
    twice the bound: what had been saved up, and what came in meanwhile.
    """

    def __init__(
        self,
        requests_per_minute: float | None,
        tokens_per_minute: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        now = clock()
        self._requests = None if requests_per_minute is None else Bucket(requests_per_minute, now)
        self._tokens = None if tokens_per_minute is None else Bucket(tokens_per_minute, now)
        self._turn = asyncio.Lock()

    async def take(self, tokens: int, patience: float | None = None) -> None:
        """Wait until one request of that many tokens may go, and count it.

        Raises RateLimitedError if that takes longer than ``patience`` seconds; nothing is counted.
        """
        began = self._clock()
        try:
            async with asyncio.timeout(patience), self._turn:
                while wait := self._wait(tokens):
                    if patience is not None and self._clock() - began + wait > patience:
                        raise RateLimitedError(
                            "the limit of requests leaves no room in time", retry_after=wait
                        )
                    await asyncio.sleep(wait)
                if self._requests is not None:
                    self._requests.level -= 1
                if self._tokens is not None:
                    self._tokens.level -= tokens
        except TimeoutError:
            raise RateLimitedError(
                "others wait for the limit of requests already", retry_after=patience
            ) from None

    def settle(self, counted: int, used: int) -> None:
        """What was counted as that many tokens turned out to use others."""
        if self._tokens is not None:
            self._tokens.level += counted - used

    def slow_down(self) -> None:
        """The server has had too much: half the rate from now on, and doubling every minute."""
        for bucket in self._buckets():
            bucket.fill(self._clock())
            bucket.slow_down()

    def _wait(self, tokens: int) -> float:
        now = self._clock()
        for bucket in self._buckets():
            bucket.fill(now)
        waits = []
        if self._requests is not None:
            waits.append(self._requests.wait_for(1))
        if self._tokens is not None:
            waits.append(self._tokens.wait_for(tokens))
        wait = max(waits, default=0.0)
        # Below the clock's grain a wait would never end.
        return wait if wait > 1e-6 else 0.0

    def _buckets(self) -> list[Bucket]:
        return [bucket for bucket in (self._requests, self._tokens) if bucket is not None]
