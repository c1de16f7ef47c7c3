"""A runner without an engine: it plays what a test or a simulation tells it to."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from steppe.client import ModelCard
from steppe.engine.activity import EngineActivity
from steppe.engine.config import EngineHealth
from steppe.engine.metrics import EngineMetrics
from steppe.errors import BackpressureError, ReplicaLostError
from steppe.replicas.vocabulary import RunnerStatus, TokenChunk, TransportKind
from steppe.request import FinishReason, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from steppe.replicas.vocabulary import ExecuteBatch
    from steppe.stepping.cache_metrics import ContextCacheMetrics

__all__ = ["Play", "ScriptedRunner", "scripted_card"]


@dataclass(frozen=True, slots=True)
class Play:
    """How one request goes: ``tokens`` chunks of one token, the first after ``first`` seconds, each
    further one after ``between``, then the ``ending``.

    ``stop`` is an orderly end; ``raise`` raises ``error``; ``hang`` never comes; ``silence`` ends
    the stream without an end; ``babble`` goes on after the end. ``refuse`` is raised before the
    request is accepted, after ``delay`` seconds.
    """

    tokens: int = 4
    first: float = 0.0
    between: float = 0.0
    delay: float = 0.0
    ending: Literal["stop", "raise", "hang", "silence", "babble"] = "stop"
    error: Exception | None = None
    refuse: Exception | None = None


def scripted_card(max_batch_size: int = 4, max_pending: int = 16) -> ModelCard:
    """The card of a model that is not there."""
    return ModelCard(
        name="scripted",
        context_length=4096,
        vocab_size=1000,
        max_batch_size=max_batch_size,
        max_pending=max_pending,
        has_chat_template=False,
    )


@dataclass(slots=True)
class Seen:
    """What became of one request, as its runner saw it."""

    batch: ExecuteBatch
    chunks: int = 0
    left: bool = False
    """Closed by its reader before the end."""


@dataclass(slots=True, eq=False)
class ScriptedRunner:
    """A ``ModelRunner`` that plays ``play`` for every request, or what it returns for one.

    ``seats`` run at once (None: everybody), the rest wait in order; beyond ``limit`` it refuses.
    ``start_seconds`` is how long a start takes, ``start_errors`` what the next starts raise;
    ``cache`` is what it says of its cache. Time is the event loop's.
    """

    play: Play | Callable[[ExecuteBatch], Play] = field(default_factory=Play)
    seats: int | None = None
    limit: int | None = None
    start_seconds: float = 0.0
    start_errors: list[Exception] = field(default_factory=list)
    transport_kind: TransportKind = TransportKind.LOCAL_CPU
    card: ModelCard = field(default_factory=scripted_card)
    reads_text: bool = True
    cache: ContextCacheMetrics | None = None

    seen: list[Seen] = field(default_factory=list, init=False)
    starts: int = field(default=0, init=False)
    live: int = field(default=0, init=False)
    resident: int = field(default=0, init=False)
    most_resident: int = field(default=0, init=False)
    outcomes: Counter[str] = field(default_factory=Counter, init=False)
    _dead: asyncio.Future[Exception] | None = field(default=None, init=False)
    _line: deque[asyncio.Future[None]] = field(default_factory=deque, init=False)
    _moving: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    # ---- what a test does to it ------------------------------------------------------------------

    def crash(self, error: Exception | None = None) -> None:
        """Die as a process does: everything that is open raises ReplicaLostError. Nothing happens
        to one that has not started.
        """
        if self._dead is None:
            return
        if not self._dead.done():
            self._dead.set_result(error or ReplicaLostError("the scripted runner crashed"))
        self._moving.set()
        while self._line:
            self._seat_next()

    def freeze(self) -> None:
        """Hang: no chunk, no answer to a probe, until ``thaw`` or a crash."""
        self._moving.clear()

    def thaw(self) -> None:
        """Go on."""
        self._moving.set()

    # ---- ModelRunner -----------------------------------------------------------------------------

    async def start(self) -> None:
        self.starts += 1
        if self.start_seconds:
            await asyncio.sleep(self.start_seconds)
        if self.start_errors:
            raise self.start_errors.pop(0)
        self._dead = asyncio.get_running_loop().create_future()
        self.outcomes.clear()
        self._line.clear()
        self._moving.set()

    async def lost(self) -> Exception:
        assert self._dead is not None
        return await asyncio.shield(self._dead)

    async def execute(self, batch: ExecuteBatch) -> AsyncGenerator[TokenChunk, None]:
        play = self.play if isinstance(self.play, Play) else self.play(batch)
        if play.delay:
            await asyncio.sleep(play.delay)
        self._check_alive()
        if play.refuse is not None:
            raise play.refuse
        if self.limit is not None and self.live >= self.limit:
            raise BackpressureError("backlog_full", f"{self.live} are live already")
        seen = Seen(batch)
        self.seen.append(seen)
        return self._stream(seen, play)

    async def status(self) -> RunnerStatus:
        await self._moving.wait()
        self._check_alive()
        ended = {name: self.outcomes[name] for name in ("completed", "cancelled", "failed")}
        return RunnerStatus(
            EngineHealth(True, "running", self.live - self.resident, self.resident),
            EngineMetrics(
                submitted=self.live + sum(ended.values()), tokens=self.outcomes["tokens"], **ended
            ),
            self.cache,
        )

    async def activity(self, after: int = 0) -> EngineActivity:
        return EngineActivity(asyncio.get_running_loop().time(), (), ())

    async def close(self) -> None:
        if self._dead is not None:
            self.crash(ReplicaLostError("the scripted runner was closed"))

    # ---- inside ----------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._dead is None:
            raise ReplicaLostError("the scripted runner was never started")
        if self._dead.done():
            raise ReplicaLostError(str(self._dead.result()))

    async def _stream(self, seen: Seen, play: Play) -> AsyncGenerator[TokenChunk, None]:
        self.live += 1
        outcome = "cancelled"
        try:
            await self._seat()
            try:
                async for chunk in self._chunks(seen, play):
                    if chunk.finished:
                        outcome = "completed"
                    yield chunk
            finally:
                self.resident -= 1
                if self._line:
                    self._seat_next()
        except (GeneratorExit, asyncio.CancelledError):
            seen.left = outcome == "cancelled"
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self.outcomes[outcome] += 1
            self.live -= 1

    async def _seat(self) -> None:
        """Wait for a seat, in order of arrival."""
        if self.seats is None or (self.resident < self.seats and not self._line):
            self.resident += 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._line.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    if turn in self._line:
                        self._line.remove(turn)
                else:
                    self.resident -= 1
                    if self._line:
                        self._seat_next()
                raise
        self.most_resident = max(self.most_resident, self.resident)

    def _seat_next(self) -> None:
        while self._line:
            turn = self._line.popleft()
            # One that was cancelled stands in line until its task has run.
            if not turn.done():
                self.resident += 1
                turn.set_result(None)
                return

    async def _chunks(self, seen: Seen, play: Play) -> AsyncGenerator[TokenChunk, None]:
        first = seen.batch.request_id
        for number in range(play.tokens):
            await self._pause(play.between if number else play.first)
            seen.chunks += 1
            self.outcomes["tokens"] += 1
            token = (first + number) % 1000
            yield TokenChunk(0, f"{token} ", (token,))
        if play.ending == "hang":
            await self.lost()
            self._check_alive()
        if play.ending == "raise":
            await self._pause(play.between)
            raise play.error or ReplicaLostError("scripted")
        if play.ending == "silence":
            return
        end = FinishReason.LENGTH
        yield TokenChunk(0, finished=True, finish_reason=end, usage=Usage(1, play.tokens, 0))
        if play.ending == "babble":
            yield TokenChunk(0, "more", (1,))

    async def _pause(self, seconds: float) -> None:
        assert self._dead is not None
        if seconds:
            await asyncio.wait((self._dead,), timeout=seconds)
        else:
            await asyncio.sleep(0)  # a chunk is an event of its own
        if not self._moving.is_set():
            await self._moving.wait()
        self._check_alive()
