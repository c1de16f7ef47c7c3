"""A runner over any OpenAI-compatible server (seed 003, ``RemoteEngineCore``)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from steppe.engine.activity import EngineActivity, LiveSequence
from steppe.engine.config import EngineHealth
from steppe.engine.metrics import EngineMetrics
from steppe.errors import (
    DeadlineExceededError,
    NetworkError,
    ReplicaLostError,
    SteppeError,
    SubmitError,
    UpstreamError,
    UpstreamTimeoutError,
)
from steppe.replicas.remote.answers import embedding_of
from steppe.replicas.remote.attempts import Attempts, Line, TimeLimit, earliest
from steppe.replicas.remote.breaker import CircuitBreaker
from steppe.replicas.remote.handle import RemoteHandle, SingleChunk
from steppe.replicas.remote.http import Wire, body_of
from steppe.replicas.remote.limiter import RateLimiter
from steppe.replicas.remote.requests import embedding_body, generation_body, tokens_of
from steppe.replicas.vocabulary import RunnerStatus, TransportKind

if TYPE_CHECKING:
    import httpx2

    from steppe.client import ModelCard
    from steppe.replicas.remote.config import RemoteConfig
    from steppe.replicas.runner import RunHandle
    from steppe.replicas.vocabulary import ExecuteBatch, TokenChunk
    from steppe.request import LLMGenerationRequest

__all__ = ["RemoteRunner"]


class RemoteRunner:
    """A ``ModelRunner`` whose engine is a server elsewhere. One event loop, whose time it uses.

    ``card`` describes the model as our clients see it; the server's own limit of the context is
    heeded where it says one that is shorter. ``transport`` replaces the network and ``draw`` the
    randomness of pauses, for tests.
    """

    transport_kind = TransportKind.REMOTE_NETWORK
    reads_text = True

    def __init__(
        self,
        config: RemoteConfig,
        card: ModelCard,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        draw: random.Random | None = None,
    ) -> None:
        self._config = config
        self._card = card
        self._transport = transport
        self._draw = draw or random.Random()
        self._life: Connection | None = None

    @property
    def card(self) -> ModelCard:
        return self._connection().card

    async def start(self) -> None:
        """Connect, and find the model. Raises ReplicaError."""
        await self.close()
        life = Connection(self._config, self._card, self._transport, self._draw)
        try:
            await life.find_model()
        except BaseException:
            await life.close()
            raise
        self._life = life

    async def lost(self) -> Exception:
        """Returns after ``close`` only: a network that fails may come back at any time."""
        return await asyncio.shield(self._connection().over)

    async def execute(self, batch: ExecuteBatch) -> RunHandle:
        return await self._connection().execute(batch)

    async def status(self) -> RunnerStatus:
        return await self._connection().status()

    async def activity(self, after: int = 0) -> EngineActivity:
        """Who has not ended. The steps are the server's own affair."""
        return self._connection().activity()

    async def close(self) -> None:
        if self._life is not None:
            await self._life.close()

    def _connection(self) -> Connection:
        if self._life is None:
            raise SubmitError("unavailable", "the remote engine has not been reached yet")
        return self._life


class Connection:
    """One life of a runner: from a start to a close."""

    def __init__(
        self,
        config: RemoteConfig,
        card: ModelCard,
        transport: httpx2.AsyncBaseTransport | None,
        draw: random.Random,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.card = card
        self.over: asyncio.Future[Exception] = loop.create_future()
        self._config = config
        self._model = config.model
        self._live: dict[int, RemoteHandle] = {}
        self._counts: Counter[str] = Counter()
        breaker = CircuitBreaker(
            failures=config.failures,
            seconds=config.open_seconds,
            most_seconds=config.most_open_seconds,
            probes=config.probes,
            clock=loop.time,
        )
        limiter = RateLimiter(config.requests_per_minute, config.tokens_per_minute, clock=loop.time)
        self._line = Line(config, Wire(config, transport), breaker, limiter, draw)

    # ---- the server ------------------------------------------------------------------------------

    async def find_model(self) -> None:
        """Take the model that was named, or the first there is. Raises ReplicaError."""
        found = await self._line.wire.get("/models")
        models = found.get("data") if isinstance(found, dict) else None
        if not isinstance(models, list):
            raise NetworkError("the list of models is not one")
        known = {one.get("id"): one for one in models if isinstance(one, dict)}
        if self._model is None:
            self._model = next((name for name in known if isinstance(name, str)), None)
        if self._model not in known:
            raise UpstreamError(
                f"the remote engine has no model {self._model or 'at all'}", status=404
            )
        length = known[self._model].get("max_model_len")
        if isinstance(length, int) and 0 < length < self.card.context_length:
            self.card = replace(self.card, context_length=length)

    async def status(self) -> RunnerStatus:
        """The server's own word, and what was counted here. Raises ReplicaError."""
        self._check_open()
        try:
            said = await self._line.wire.get("/health")
        except UpstreamError as error:
            if error.status not in (404, 405, 501):
                raise
            said = await self._line.wire.get("/models")
        report: dict[str, Any] = said if isinstance(said, dict) else {}
        count = self._counts
        open_ = self._line.breaker.state == "open"
        return RunnerStatus(
            EngineHealth(
                not open_,
                "running",
                _count(report.get("queued"), 0),
                _count(report.get("resident"), len(self._live)),
                cause="it failed too often and is left alone" if open_ else None,
            ),
            EngineMetrics(
                submitted=count["submitted"],
                refused=count["refused"],
                completed=count["completed"],
                cancelled=count["cancelled"],
                failed=count["failed"],
                tokens=count["tokens"],
            ),
        )

    def activity(self) -> EngineActivity:
        """Who has not ended."""
        live = tuple(
            LiveSequence(
                request_id,
                request_id,
                None,
                one.began,
                one.prompt_tokens,
                one.tokens,
                one.batch.request.params.max_tokens,
                False,
            )
            for request_id, one in self._live.items()
        )
        return EngineActivity(self._loop.time(), (), live)

    # ---- requests --------------------------------------------------------------------------------

    async def execute(self, batch: ExecuteBatch) -> RunHandle:
        """Send it, again where that may help; returns once the server has taken it."""
        self._check_open()
        assert self._model is not None
        request = batch.request
        tokens = tokens_of(request, self.card.context_length)
        limits, first_limits, queue_limits = self._time_limits(request)
        before = earliest([*limits, *first_limits, *queue_limits])
        try:
            if request.task == "embed":
                path, body = embedding_body(request, self._model)
                chunk = await self._embed(Attempts(self._line, path, body, tokens), before)
                self._counts.update(submitted=1, completed=1)
                return SingleChunk(chunk)
            path, body = generation_body(request, self._model, extensions=self._config.extensions)
            attempts = Attempts(self._line, path, body, tokens)
            answer = await attempts.open(before)
            handle = RemoteHandle(self, batch, attempts, answer, limits, first_limits)
            self._live[batch.request_id] = handle
            self._counts["submitted"] += 1
            return handle
        except SteppeError:
            self._counts["refused"] += 1
            raise

    async def _embed(self, attempts: Attempts, limit: TimeLimit | None) -> TokenChunk:
        answer = await attempts.open(limit)
        try:
            chunk = embedding_of(await body_of(answer.response))
        except SteppeError:
            answer.permit.failed()
            raise
        answer.permit.succeeded()
        return chunk

    def ended(self, handle: RemoteHandle, outcome: str) -> None:
        """A handle has ended."""
        self._counts[outcome] += 1
        self._counts["tokens"] += handle.tokens
        del self._live[handle.batch.request_id]

    def _time_limits(
        self, request: LLMGenerationRequest
    ) -> tuple[list[TimeLimit], list[TimeLimit], list[TimeLimit]]:
        """Those of the whole request, of its first chunk, and of its acceptance."""
        now = self._loop.time()
        limits = []
        if (total := self._config.total_timeout) is not None:
            error: SteppeError = UpstreamTimeoutError("total", f"not done after {total:g} s")
            limits.append(TimeLimit(now + total, error))

        def own(which: str, seconds: float | None) -> list[TimeLimit]:
            if seconds is None:
                return []
            error = DeadlineExceededError(which, f"the {which} limit of {seconds:g} s passed")
            return [TimeLimit(now + seconds, error)]

        limits += own("total", request.timeout)
        first = own("first_token", request.first_token_timeout)
        return limits, first, own("queue", request.queue_timeout)

    # ---- the end ---------------------------------------------------------------------------------

    async def close(self) -> None:
        """End everything now."""
        lost = ReplicaLostError("the connection to the remote engine was closed")
        if not self.over.done():
            self.over.set_result(lost)
        for handle in list(self._live.values()):
            await handle.abort(lost)
        await self._line.wire.close()

    def _check_open(self) -> None:
        if self.over.done():
            raise ReplicaLostError("the connection to the remote engine was closed")


def _count(value: object, default: int) -> int:
    return value if isinstance(value, int) and value >= 0 else default
