"""Data parallel replicas behind one ``EngineClient`` (seed 003): placement, moves, replacement."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from steppe.client.rate import ServiceRate
from steppe.client.text import TextService, WithText, with_ids
from steppe.engine.config import EngineHealth, HealthState
from steppe.errors import ConfigError, InvalidRequestError, SubmitError, UnsupportedRequestError
from steppe.replicas.account import Account, added
from steppe.replicas.fleet_activity import FleetActivity
from steppe.replicas.handle import ReplicaHandle
from steppe.replicas.policies import LeastLoaded
from steppe.replicas.rotation import CoordinatorConfig, Rotation
from steppe.replicas.routing import RoutedRequest
from steppe.replicas.vocabulary import ExecuteBatch, ReplicaState
from steppe.stepping.cache_metrics import together

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from steppe.client import ModelCard, ReplicaReport
    from steppe.engine.activity import EngineActivity
    from steppe.engine.metrics import EngineMetrics
    from steppe.replicas.engine_core import EngineCoreActor
    from steppe.replicas.policies import Policy
    from steppe.replicas.rotation import Seat
    from steppe.request import LLMGenerationRequest
    from steppe.stepping.cache_metrics import ContextCacheMetrics

__all__ = ["DpCoordinator"]

BEST_FIRST: tuple[HealthState, ...] = (
    "running", "stalled", "loading", "stopping", "failed", "stopped",
)  # fmt: skip
"""States of replicas: together, those that are not ready are in the best of theirs."""


class DpCoordinator(WithText[TextService]):
    """An ``EngineClient`` over replicas of one model (seed 003). One event loop.

    Placement goes by what replicas said when they were last polled and what they were given since;
    it waits for no poll. ``rng`` decides ties, so a seeded one makes it repeatable.
    """

    def __init__(
        self,
        replicas: Iterable[EngineCoreActor],
        *,
        text: TextService,
        policy: Policy | None = None,
        config: CoordinatorConfig | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(text)
        self.config = config or CoordinatorConfig()
        self._policy = policy or LeastLoaded()
        self._rng = rng or random.Random()
        self._rotation = Rotation(self.config)
        for actor in replicas:
            self._rotation.add(actor)
        if not self._rotation.seats:
            raise ConfigError("replicas", "a coordinator needs one at least")
        self._leaving: dict[EngineCoreActor, asyncio.Task[None]] = {}
        self._live: dict[int, RoutedRequest] = {}
        self._account = Account()
        self._gone: list[EngineMetrics] = []
        self._gone_cache: ContextCacheMetrics | None = None
        self._next_id = 1
        self._accepting = True
        self._idle = asyncio.Event()
        self._idle.set()
        self._end: asyncio.Task[None] | None = None
        self._rate = ServiceRate(lambda: asyncio.get_running_loop().time())
        self._activity = FleetActivity()
        self._card: ModelCard | None = None

    # ---- replicas --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every replica; returns when all that will ever be ready are.

        Raises what the first of them failed with if none is; those that failed stay out.
        """
        seats = list(self._rotation.seats.values())
        results = await asyncio.gather(
            *(seat.actor.start() for seat in seats), return_exceptions=True
        )
        failures = [one for one in results if isinstance(one, BaseException)]
        if len(failures) == len(results):
            raise failures[0]
        for seat, result in zip(seats, results, strict=True):
            if isinstance(result, BaseException):
                self._rotation.down(seat, str(result))
        self._rotation.start()

    def register(self, actor: EngineCoreActor) -> None:
        """Take a replica that was started into rotation. Idempotent. Raises ConfigError."""
        self._rotation.add(actor)

    async def deregister(self, name: str, *, patience: float | None = None) -> None:
        """Take a replica out: it gets nothing more, finishes what it has, and is closed. Unknown
        names are ignored.
        """
        seat = self._rotation.remove(name)
        if seat is None:
            return
        # Whoever waits for it may give up; it still leaves.
        leaving = asyncio.get_running_loop().create_task(self._leave(seat.actor, patience))
        self._leaving[seat.actor] = leaving
        await asyncio.shield(leaving)

    async def _leave(self, actor: EngineCoreActor, patience: float | None) -> None:
        try:
            await actor.drain(patience)
        finally:
            del self._leaving[actor]
            self._gone = [added((*self._gone, await actor.metrics()))]
            cache = await actor.context_cache_metrics()
            if cache is not None:
                self._gone_cache = together((self._gone_cache, cache.after_the_end()))

    async def replace(
        self, name: str, successor: EngineCoreActor, *, patience: float | None = None
    ) -> None:
        """Rolling replacement: the successor is ready before the old replica gets nothing more, and
        that finishes what it has, so that no request is lost. Raises what the successor failed to
        start with, or SubmitError (``shutting_down``); then the old one stays, and the successor
        is closed.
        """
        try:
            self._check_accepting()
            await successor.start()
            self._check_accepting()
            self.register(successor)
        except BaseException:
            await successor.drain(0.0)
            raise
        await self.deregister(name, patience=patience)

    @property
    def actors(self) -> list[EngineCoreActor]:
        """The replicas that are not leaving, in the order in which they came."""
        return [seat.actor for seat in self._rotation.seats.values()]

    def replicas(self) -> tuple[ReplicaReport, ...]:
        """Every replica, as it is now."""
        return tuple(
            seat.actor.report(in_rotation=seat.up and seat.actor.state is ReplicaState.READY)
            for seat in self._rotation.seats.values()
        )

    # ---- the router of its requests --------------------------------------------------------------

    def choose(self, batch: ExecuteBatch, without: AbstractSet[str]) -> Seat | None:
        """A replica for it, not one of those."""
        among = self._rotation.ready
        if without:
            among = [seat for seat in among if seat.name not in without]
        if not among:
            return None
        return self._policy.choose(among, batch.request, self._rng)

    def refused(self, seat: Seat, error: SubmitError) -> None:
        """A replica did not take a request: one that takes none is out until it says otherwise."""
        if error.reason in ("unavailable", "shutting_down", "failed"):
            self._rotation.down(seat, error)

    def let_down(self, seat: Seat, error: Exception) -> None:
        """A replica was lost under a request."""
        if seat.actor.state is not ReplicaState.READY:
            self._rotation.down(seat, error)

    def begun(self, routed: RoutedRequest) -> None:
        """A runner has accepted it."""
        if not routed.counted:
            routed.counted = True
            self._account.begin()

    def ended(self, routed: RoutedRequest, error: Exception | None) -> None:
        """A request has its end: counted once, however many replicas it met."""
        self._live.pop(routed.batch.request_id, None)
        if not self._live:
            self._idle.set()
        accepted = routed.output.was_accepted
        if not accepted and isinstance(error, SubmitError | InvalidRequestError):
            self._account.refused += isinstance(error, SubmitError)
            return
        self.begun(routed)
        self._account.end(error)

    # ---- EngineClient: requests ------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        """The model, with the room of all replicas together. Raises SubmitError before any of them
        was ready.
        """
        if self._card is None:
            self._card = next(iter(self._rotation.seats.values())).actor.card
        actors, cache = self.actors, self._card.cache_tokens
        tokens = self._card.max_pending_tokens
        return replace(
            self._card,
            max_batch_size=self._card.max_batch_size * len(actors),
            max_pending=sum(actor.config.max_concurrent for actor in actors),
            cache_tokens=None if cache is None else cache * len(actors),
            max_pending_tokens=None if tokens is None else tokens * len(actors),
        )

    @property
    def accepting(self) -> bool:
        """False once it drains, or every replica has failed."""
        return self._accepting and any(
            seat.actor.accepting for seat in self._rotation.seats.values()
        )

    def check_room(self, sequences: int) -> None:
        """Raise SubmitError if that many more would be refused now."""
        self._check_accepting()
        free = most = 0
        for seat in self._rotation.ready:
            limit = seat.actor.config.max_concurrent
            most += limit
            free += limit - seat.actor.in_flight
            if free >= sequences:
                return
        if not self._rotation.ready:
            raise SubmitError("unavailable", "no replica is ready")
        if sequences > most:
            raise UnsupportedRequestError(
                "n", f"{sequences} sequences, and no more than {most} may be pending"
            )
        raise SubmitError("backlog_full", f"{most - free} of {most} places are taken")

    def _check_accepting(self) -> None:
        if not self._accepting:
            raise SubmitError("shutting_down", "the replicas are shutting down")

    async def submit(self, request: LLMGenerationRequest) -> ReplicaHandle:
        """Hand a request over; returns when a runner has accepted it.

        Raises InvalidRequestError and its kin, SubmitError, ReplicaError.
        """
        request.check_single()
        self._check_accepting()
        most = self._rotation.most_places
        if request.params.n > most:
            raise UnsupportedRequestError(
                "n", f"{request.params.n} sequences, and no replica has more than {most} places"
            )
        if self._rotation.need_ids:
            request = await with_ids(request, self)
        batch = ExecuteBatch(self._next_id, request)
        self._next_id += batch.places
        routed = RoutedRequest(self, batch)
        self._live[batch.request_id] = routed
        self._idle.clear()
        output = routed.output
        try:
            await routed.place()
            await output.accepted()
        except asyncio.CancelledError:
            output.cancel()
            raise
        except SubmitError as error:
            output.on_failure = None
            output.close(error)
            raise
        if not output.done:
            self.begun(routed)
        return ReplicaHandle(batch.request_id, output)

    def cancel(self, request_id: int) -> None:
        """Cancel by id; unknown and retired ids are ignored."""
        routed = self._live.get(request_id)
        if routed is not None:
            routed.output.cancel()

    def cancel_all(self) -> None:
        """Cancel everything that is live."""
        for routed in list(self._live.values()):
            routed.output.cancel()

    def retry_after(self) -> float:
        """Seconds after which a refused request is likely to find room."""
        self._rate.observe(self._account.ended)
        return self._rate.seconds_for(len(self._live) / 2)

    # ---- EngineClient: state ---------------------------------------------------------------------

    @property
    def account(self) -> Account:
        """What became of its requests. To be read only."""
        return self._account

    async def health(self) -> EngineHealth:
        """Ready while one replica is in rotation; failed when all have failed."""
        seats = list(self._rotation.seats.values())
        each = [await seat.actor.health() for seat in seats]
        queued = sum(one.queued for one in each)
        resident = sum(one.resident for one in each)
        down = [
            f"{s.name}: {h.cause or h.state}" for s, h in zip(seats, each, strict=True) if not h.ok
        ]
        cause = "; ".join(down) or None

        def health(ok: bool, state: HealthState) -> EngineHealth:
            return EngineHealth(ok, state, queued, resident, None, cause)

        if self._end is not None:
            return health(False, "stopped" if self._end.done() else "stopping")
        if any(seat.up and one.ok for seat, one in zip(seats, each, strict=True)):
            return health(True, "running")
        return health(False, min((one.state for one in each), key=BEST_FIRST.index))

    async def metrics(self) -> EngineMetrics:
        """The counters of all engines together, with its own account of requests."""
        each = [await actor.metrics() for actor in (*self.actors, *self._leaving)]
        engines = added((*self._gone, *each))
        return replace(self._account.over(engines), tokens=engines.tokens)

    async def context_cache_metrics(self) -> ContextCacheMetrics | None:
        """The caches of all engines that tell of theirs, as one."""
        each = [await actor.context_cache_metrics() for actor in (*self.actors, *self._leaving)]
        return together((self._gone_cache, *each))

    async def activity(self, after: int = 0) -> EngineActivity:
        """What all engines are doing: seats side by side, steps as they began."""
        return await self._activity.look(self.actors, after)

    async def drain(self, patience: float | None) -> None:
        """Accept nothing more, finish what runs, cancel what is left after ``patience`` seconds,
        and close every replica. Idempotent.
        """
        if self._end is None:
            self._accepting = False
            self._end = asyncio.get_running_loop().create_task(self._drain(patience))
        await asyncio.shield(self._end)

    async def _drain(self, patience: float | None) -> None:
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()
        except TimeoutError:
            self.cancel_all()
        self._rotation.stop()
        leaving = list(self._leaving.items())
        await asyncio.gather(
            *(actor.drain(0.0) for actor in (*self.actors, *(actor for actor, _ in leaving))),
            *(task for _, task in leaving),
        )
