"""Which replicas are in rotation: polled without waiting, ejected when silent, taken back when
they answer.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from steppe.errors import ConfigError, SubmitError
from steppe.replicas.messages import GetLoad

if TYPE_CHECKING:
    from steppe.replicas.engine_core import EngineCoreActor

__all__ = ["CoordinatorConfig", "Rotation", "Seat"]

logger = logging.getLogger("steppe.replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """How replicas are polled and requests are moved. Times in seconds of the event loop.

    A poll every ``poll_interval``; one that has no answer after ``poll_timeout`` is missed, and
    ``eject_after`` misses in a row take a replica out of rotation until it answers again. A request
    that was let down before its first chunk moves on; after ``max_losses`` replicas were lost under
    it, it may be what kills them, and fails. It waits at most ``patience`` for room elsewhere.

    Raises ConfigError naming the field.
    """

    poll_interval: float = 0.25
    poll_timeout: float = 1.0
    eject_after: int = 3
    max_losses: int = 1
    patience: float = 30.0

    def __post_init__(self) -> None:
        for name in ("poll_interval", "poll_timeout", "patience"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, f"must be more than 0 seconds, not {getattr(self, name)}")
        for name, least in (("eject_after", 1), ("max_losses", 0)):
            if getattr(self, name) < least:
                raise ConfigError(name, f"must be at least {least}, not {getattr(self, name)}")


class Seat:
    """A replica as its coordinator knows it: what it said last, and what it was given since."""

    __slots__ = ("_asked_at", "_asked_credit", "_reply", "actor", "credit", "load", "misses",
                 "name", "score", "up")  # fmt: skip

    def __init__(self, actor: EngineCoreActor) -> None:
        self.actor = actor
        self.name = actor.name
        self.up = True
        """In rotation."""
        self.load = actor.load
        self.credit = 0
        """Places routed here that its last answer may not know of."""
        self.misses = 0
        self.score = self.load
        self._reply: asyncio.Future[float] | None = None
        self._asked_at = 0.0
        self._asked_credit = 0

    def give(self, places: int) -> None:
        """That many places were routed here (or, negative, came back)."""
        self.credit = max(0, self.credit + places)
        self._rate()

    def _rate(self) -> None:
        self.score = self.load + self.credit / self.actor.config.max_concurrent + self.misses


class Rotation:
    """The replicas of a coordinator, and which of them may get requests. One event loop."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self.seats: dict[str, Seat] = {}
        self.ready: list[Seat] = []
        """Those in rotation."""
        self.most_places = 0
        """The most that one replica has: a request that needs more can never be served."""
        self.need_ids = False
        """Whether one of them only takes token ids."""
        self._polling: asyncio.Task[None] | None = None

    def add(self, actor: EngineCoreActor) -> Seat:
        """Take a replica in; one that is known already changes nothing. Raises ConfigError when
        another has its name.
        """
        seat = self.seats.get(actor.name)
        if seat is None:
            seat = self.seats[actor.name] = Seat(actor)
            self._list()
        elif seat.actor is not actor:
            raise ConfigError("name", f"there is a replica {actor.name!r} already")
        return seat

    def remove(self, name: str) -> Seat | None:
        """Take a replica out for good."""
        seat = self.seats.pop(name, None)
        if seat is not None:
            seat.up = False
            self._list()
        return seat

    def down(self, seat: Seat, why: Exception | str) -> None:
        """Out of rotation, until it answers a poll."""
        if seat.up:
            logger.warning("replica %s is out of rotation: %s", seat.name, why)
            seat.up = False
            self._list()

    def _list(self) -> None:
        # Who is in rotation changes seldom; every request asks.
        seats = self.seats.values()
        self.ready = [seat for seat in seats if seat.up]
        places = [seat.actor.config.max_concurrent for seat in seats]
        self.most_places = max(places, default=0)
        self.need_ids = any(not seat.actor.runner.reads_text for seat in seats)

    # ---- polls -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Poll from now on."""
        if self._polling is None:
            self._polling = asyncio.get_running_loop().create_task(self._poll_for_ever())

    def stop(self) -> None:
        """Poll no more."""
        if self._polling is not None:
            self._polling.cancel()

    async def _poll_for_ever(self) -> None:
        while True:
            self.poll()
            await asyncio.sleep(self._config.poll_interval)

    def poll(self) -> None:
        """Ask everybody whose last answer is there; note who is late. Waits for nobody."""
        loop = asyncio.get_running_loop()
        for seat in self.seats.values():
            if seat._reply is not None:
                if loop.time() - seat._asked_at < self._config.poll_timeout:
                    continue
                seat._reply.cancel()
                self._missed(seat, "it does not answer")
            reply = loop.create_future()
            try:
                seat.actor.tell(GetLoad(reply))
            except SubmitError as error:
                self._missed(seat, error)
                continue
            seat._reply, seat._asked_at, seat._asked_credit = reply, loop.time(), seat.credit
            reply.add_done_callback(partial(self._answered, seat))

    def _answered(self, seat: Seat, reply: asyncio.Future[float]) -> None:
        if seat._reply is reply:
            seat._reply = None
        if reply.cancelled():
            return
        error = reply.exception()
        if error is not None:
            self._missed(seat, error)
            return
        seat.load = reply.result()
        # What was routed before the question is in the answer: the mailbox keeps its order.
        seat.credit = max(0, seat.credit - seat._asked_credit)
        seat.misses = 0
        seat._rate()
        if not seat.up and self.seats.get(seat.name) is seat:
            logger.warning("replica %s is in rotation again", seat.name)
            seat.up = True
            self._list()

    def _missed(self, seat: Seat, why: BaseException | str) -> None:
        seat._reply = None
        seat.misses += 1
        seat._rate()
        # Who says that it takes nothing need not be asked again before it is believed.
        said_no = isinstance(why, SubmitError) and not seat.actor.accepting
        if said_no or seat.misses >= self._config.eject_after:
            self.down(seat, str(why))
