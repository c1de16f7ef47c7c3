"""The tries that one request has, until something of its answer has come."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steppe.errors import CircuitOpenError, RateLimitedError, SteppeError

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    import httpx2

    from steppe.replicas.remote.breaker import CircuitBreaker, Permit
    from steppe.replicas.remote.config import RemoteConfig
    from steppe.replicas.remote.http import Wire
    from steppe.replicas.remote.limiter import RateLimiter

__all__ = ["Answer", "Attempts", "Line", "TimeLimit", "earliest"]


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A time of the event loop, and what to say when it has passed."""

    at: float
    error: SteppeError


def earliest(limits: Sequence[TimeLimit]) -> TimeLimit | None:
    """The one that passes first."""
    return min(limits, key=lambda limit: limit.at, default=None)


@dataclass(frozen=True, slots=True)
class Line:
    """What all requests to one server share."""

    config: RemoteConfig
    wire: Wire
    breaker: CircuitBreaker
    limiter: RateLimiter
    draw: random.Random


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a try, its body unread. Whoever has it closes it and settles the permit."""

    response: httpx2.Response
    permit: Permit


class Attempts:
    """Each try asks the breaker, waits for the limiter, then sends."""

    def __init__(self, line: Line, path: str, body: dict[str, Any], tokens: int) -> None:
        self._line = line
        self._path = path
        self._body = body
        self._tokens = tokens
        self._made = 0

    async def open(self, limit: TimeLimit | None, after: SteppeError | None = None) -> Answer:
        """Send until the server takes it; with a pause first if a try has just failed ``after``.

        Raises what the last try raised, or the ``limit``'s error.
        """
        try:
            async with asyncio.timeout_at(None if limit is None else limit.at):
                while True:
                    if after is not None:
                        await self._pause(after, limit)
                    try:
                        return await self._try(limit)
                    except SteppeError as error:
                        if not error.retryable:
                            raise
                        after = error
        except TimeoutError:
            assert limit is not None
            raise limit.error from after

    def settle(self, used: int) -> None:
        """The answer is whole: so many tokens it took in truth."""
        self._line.limiter.settle(self._tokens, used)

    async def _try(self, limit: TimeLimit | None) -> Answer:
        line = self._line
        self._made += 1
        permit = line.breaker.permit()
        try:
            await line.limiter.take(self._tokens, _left(limit))
            try:
                response = await line.wire.post(self._path, self._body)
            except RateLimitedError:
                line.limiter.slow_down()
                raise
        except BaseException as error:
            if isinstance(error, SteppeError) and error.blames_replica:
                permit.failed()
            else:
                permit.dropped()
            raise
        return Answer(response, permit)

    async def _pause(self, error: SteppeError, limit: TimeLimit | None) -> None:
        """Wait before the next try, or raise ``error`` if there is none."""
        config = self._line.config
        if self._made >= config.attempts:
            raise error
        # Drawn anew each time, or all that failed together would come back together.
        pause = self._line.draw.uniform(0.0, config.retry_pause * 2.0 ** (self._made - 1))
        if isinstance(error, RateLimitedError | CircuitOpenError) and error.retry_after is not None:
            pause = max(pause, error.retry_after)
        left = _left(limit)
        if pause > config.most_pause or (left is not None and pause >= left):
            raise error
        await asyncio.sleep(pause)


def _left(limit: TimeLimit | None) -> float | None:
    if limit is None:
        return None
    return max(0.0, limit.at - asyncio.get_running_loop().time())
