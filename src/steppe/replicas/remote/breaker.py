"""A circuit breaker: a server that keeps failing is left alone, then tried with care.

Written here because the libraries there are let everybody through once the pause is over; what this
one promises is that exactly so many probes go first, whatever else is waiting.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from steppe.errors import CircuitOpenError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CircuitBreaker", "Permit"]


class CircuitBreaker:
    """Closed: everybody passes. Open: nobody does. Half open: ``probes`` at a time do.

    ``failures`` faults in a row open it for ``seconds``; each time a probe fails it opens again,
    twice as long, up to ``most_seconds``. As many successful probes in a row as there are places
    for close it. One thread.
    """

    def __init__(
        self,
        *,
        failures: int,
        seconds: float,
        most_seconds: float,
        probes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures = failures
        self._seconds = seconds
        self._most_seconds = most_seconds
        self._probes = probes
        self._clock = clock
        self._era = 0
        self._failed = self._succeeded = self._probing = 0
        self._pause = seconds
        self._half_open = False
        self._open_until: float | None = None

    @property
    def state(self) -> Literal["closed", "open", "half_open"]:
        """What the next ``permit`` would meet."""
        if self._open_until is None:
            return "half_open" if self._half_open else "closed"
        return "open" if self._clock() < self._open_until else "half_open"

    @property
    def retry_after(self) -> float:
        """Seconds until a request may pass again; 0 unless open."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._clock())

    def permit(self) -> Permit:
        """Leave to send one request. Raises CircuitOpenError.

        Whoever gets it says how the request went, once: until then a probe holds its place.
        """
        if self._open_until is not None:
            if self._clock() < self._open_until:
                raise CircuitOpenError(
                    f"the server failed {self._failed} times in a row and is left alone",
                    retry_after=self.retry_after,
                )
            self._open_until = None
            self._half_open = True
            self._succeeded = self._probing = 0
            self._era += 1
        if self._half_open:
            if self._probing >= self._probes:
                raise CircuitOpenError(
                    "the server is being tried after it failed", retry_after=self._seconds
                )
            self._probing += 1
        return Permit(self, self._era)

    def open(self, seconds: float | None = None) -> None:
        """Leave the server alone, for ``seconds`` or as long as it is its turn."""
        if seconds is None:
            seconds = self._pause
            self._pause = min(self._most_seconds, self._pause * 2)
        self._era += 1
        self._half_open = False
        self._open_until = self._clock() + seconds

    def close(self) -> None:
        """Let everybody pass and forget what was."""
        self._era += 1
        self._failed = self._succeeded = self._probing = 0
        self._pause = self._seconds
        self._half_open = False
        self._open_until = None

    def _settle(self, era: int, outcome: bool | None) -> None:
        # A request that was sent before the circuit last changed says nothing about it now.
        if era != self._era:
            return
        if self._half_open:
            self._probing -= 1
        if outcome is True:
            self._failed = 0
            self._succeeded += 1
            if self._half_open and self._succeeded >= self._probes:
                self.close()
        elif outcome is False:
            self._failed += 1
            if self._half_open or self._failed >= self._failures:
                self.open()


class Permit:
    """Leave to send one request. Settled once; what is said later has no effect."""

    __slots__ = ("_breaker", "_era")

    def __init__(self, breaker: CircuitBreaker, era: int) -> None:
        self._breaker: CircuitBreaker | None = breaker
        self._era = era

    def succeeded(self) -> None:
        """The server did its work."""
        self._settle(True)

    def failed(self) -> None:
        """The server was at fault."""
        self._settle(False)

    def dropped(self) -> None:
        """It says nothing about the server: our own mistake, or nobody waited for the end."""
        self._settle(None)

    def _settle(self, outcome: bool | None) -> None:
        if self._breaker is not None:
            self._breaker._settle(self._era, outcome)
            self._breaker = None
