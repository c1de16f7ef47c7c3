"""One request on its way: to a replica, and to another one while no chunk of it has come."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from steppe.errors import DeadlineExceededError, ReplicaError, SteppeError, SubmitError
from steppe.replicas.messages import AddRequest
from steppe.replicas.output import OutputChannel
from steppe.replicas.vocabulary import ExecuteBatch

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from steppe.replicas.rotation import CoordinatorConfig, Seat

__all__ = ["RoutedRequest", "Router"]

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
"""Seconds between two looks for room elsewhere: the first, and the longest."""


class Router(Protocol):
    """What a request on its way asks of its coordinator."""

    @property
    def config(self) -> CoordinatorConfig:
        """How requests are moved."""

    @property
    def accepting(self) -> bool:
        """False once everything is to end."""

    def choose(self, batch: ExecuteBatch, without: AbstractSet[str]) -> Seat | None:
        """A replica for it, not one of those; None when there is no other."""

    def refused(self, seat: Seat, error: SubmitError) -> None:
        """That replica did not take it."""

    def let_down(self, seat: Seat, error: Exception) -> None:
        """That replica was lost, or failed, under it."""

    def begun(self, routed: RoutedRequest) -> None:
        """A runner has accepted it, for the first time."""

    def ended(self, routed: RoutedRequest, error: Exception | None) -> None:
        """It has its end."""


class RoutedRequest:
    """Owns the output of one request through every replica that it meets. One event loop."""

    __slots__ = ("_again", "_losses", "_router", "_seat", "_since", "_tried", "batch", "counted",
                 "output")  # fmt: skip

    def __init__(self, router: Router, batch: ExecuteBatch) -> None:
        self.batch = batch
        self.counted = False
        """The coordinator's account has it."""
        self.output = output = OutputChannel()
        output.on_failure = self._failed
        output.on_end = self._ended
        self._router = router
        self._seat: Seat | None = None
        self._tried: set[str] = set()
        self._losses = 0
        self._since = asyncio.get_running_loop().time()
        self._again: asyncio.Task[None] | None = None

    async def place(self) -> None:
        """Find a replica that admits it. Raises SubmitError when nobody does."""
        refusal: SubmitError | None = None
        loop = asyncio.get_running_loop()
        while True:
            seat = self._router.choose(self.batch, self._tried)
            if seat is None:
                raise refusal or SubmitError("unavailable", "no replica is ready")
            self._tried.add(seat.name)
            self._seat = seat
            admission = loop.create_future()
            # At once, not when it is admitted: those who choose in between must know.
            seat.give(self.batch.places)
            try:
                seat.actor.tell(AddRequest(self.batch, self.output, admission))
                await admission
                return
            except SubmitError as error:
                seat.give(-self.batch.places)
                self._router.refused(seat, error)
                # Full is the better reason to come back later.
                if refusal is None or refusal.reason in ("unavailable", "shutting_down"):
                    refusal = error

    def _failed(self, error: Exception) -> bool:
        """A replica refused it after all, or was lost before a chunk: is there another?"""
        seat, router = self._seat, self._router
        assert seat is not None
        if isinstance(error, SubmitError):
            seat.give(-self.batch.places)
            router.refused(seat, error)
        elif isinstance(error, ReplicaError):
            router.let_down(seat, error)
        if not isinstance(error, SteppeError) or not error.retryable or not router.accepting:
            return False
        if error.blames_replica:
            self._losses += 1
            if self._losses > router.config.max_losses:
                return False
        self._again = asyncio.get_running_loop().create_task(self._move(error))
        self.output.on_cancel = self._again.cancel
        return True

    async def _move(self, cause: Exception) -> None:
        """Go elsewhere, or fail with ``cause`` when there is no elsewhere in time."""
        loop, router = asyncio.get_running_loop(), self._router
        # Who was never accepted is told at once that everybody is full.
        waits = self.output.was_accepted or not isinstance(cause, SubmitError)
        end = loop.time() + (router.config.patience if waits else 0.0)
        pause = FIRST_PAUSE
        while True:
            try:
                self.batch = self._with_time_left()
                await self.place()
                return
            except DeadlineExceededError as late:
                cause = late
                break
            except SubmitError:
                if loop.time() + pause > end or not router.accepting:
                    break
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
            # Somebody may have room by now, or be there again.
            self._tried.clear()
        self.output.on_failure = None
        self.output.close(cause)

    def _with_time_left(self) -> ExecuteBatch:
        """The batch with what is left of its time. Raises DeadlineExceededError."""
        request = self.batch.request
        now = asyncio.get_running_loop().time()
        gone, self._since = now - self._since, now
        if request.timeout is None:
            return self.batch
        if gone >= request.timeout:
            raise DeadlineExceededError("total", "its time was over before a replica could run it")
        return ExecuteBatch(self.batch.request_id, replace(request, timeout=request.timeout - gone))

    def _ended(self, error: Exception | None) -> None:
        self._router.ended(self, error)
