"""A runner over a ``RequestEngine`` in this process."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from steppe.errors import (
    EngineFailedError,
    ReplicaLostError,
    RequestFailedError,
    SubmitError,
)
from steppe.replicas.vocabulary import RunnerStatus, TokenChunk, TransportKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from steppe.client import ClientHandle, LocalClient, ModelCard
    from steppe.engine.activity import EngineActivity
    from steppe.replicas.vocabulary import ExecuteBatch
    from steppe.streaming import StreamChunk

__all__ = ["LocalRunner", "renamed"]

KNOWN_IDS = 16_384
"""Sequences whose ids are remembered: more than the steps that an engine remembers can name."""


class LocalRunner:
    """A ``ModelRunner`` over an engine that ``load`` makes, in a thread, at every start.

    An engine that hangs cannot be ended from here: give it a ``hang_limit``, or a process.
    """

    reads_text = False

    def __init__(
        self,
        load: Callable[[], LocalClient],
        *,
        transport_kind: TransportKind = TransportKind.LOCAL_CPU,
    ) -> None:
        self.transport_kind = transport_kind
        self._load = load
        self._client: LocalClient | None = None
        self._lost: asyncio.Future[Exception] | None = None
        self._names: OrderedDict[int, int] = OrderedDict()

    @property
    def client(self) -> LocalClient:
        """The engine's own client. Raises SubmitError (``unavailable``) before the first start."""
        if self._client is None:
            raise SubmitError("unavailable", "the engine has not been started")
        return self._client

    @property
    def card(self) -> ModelCard:
        return self.client.card

    async def start(self) -> None:
        loading = asyncio.get_running_loop().run_in_executor(None, self._load)
        try:
            self._client = await asyncio.shield(loading)
        except asyncio.CancelledError:
            # The thread cannot be stopped: what it makes is ended when it is there.
            loading.add_done_callback(_end_unwanted)
            raise
        self._lost = asyncio.get_running_loop().create_future()
        self._names.clear()

    async def lost(self) -> Exception:
        assert self._lost is not None
        return await asyncio.shield(self._lost)

    async def execute(self, batch: ExecuteBatch) -> LocalStream:
        try:
            handle = await self.client.submit(batch.request)
        except EngineFailedError as error:
            raise self._lose(error) from error
        for index in range(batch.places):
            self._names[handle.id + index] = batch.request_id + index
        while len(self._names) > KNOWN_IDS:
            self._names.popitem(last=False)
        return LocalStream(self, handle, batch)

    async def status(self) -> RunnerStatus:
        client = self.client
        return RunnerStatus(
            await client.health(), await client.metrics(), await client.context_cache_metrics()
        )

    async def activity(self, after: int = 0) -> EngineActivity:
        return renamed(await self.client.activity(after), self._names)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.drain(0.0)
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(ReplicaLostError("the engine was closed"))

    def _lose(self, error: Exception) -> ReplicaLostError:
        lost = ReplicaLostError(str(error))
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(lost)
        return lost

    def _failed(self, error: RequestFailedError) -> Exception:
        """What a failed request means: its own end, or that of the engine with it."""
        return error if self.client.accepting else self._lose(error)


def _end_unwanted(loading: asyncio.Future[LocalClient]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.get_loop().create_task(loading.result().drain(0.0))


class LocalStream:
    """The chunks of one request of an engine."""

    __slots__ = ("_batch", "_chunks", "_handle", "_runner")

    def __init__(self, runner: LocalRunner, handle: ClientHandle, batch: ExecuteBatch) -> None:
        self._runner = runner
        self._handle = handle
        self._batch = batch
        self._chunks: AsyncIterator[StreamChunk] = aiter(handle)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        try:
            chunk = await anext(self._chunks)
            if chunk.usage is not None:
                return await self._last(chunk)
        except RequestFailedError as error:
            raise self._runner._failed(error) from error
        return _chunk(chunk)

    async def _last(self, chunk: StreamChunk) -> TokenChunk:
        """The chunk that ends the request, with what only its response has."""
        request = self._batch.request
        last = _chunk(chunk)
        if request.params.prompt_logprobs is None and request.task != "embed":
            return last
        output = (await self._handle.result()).outputs[0]
        return replace(last, prompt_logprobs=output.prompt_logprobs, embedding=output.embedding)

    async def aclose(self) -> None:
        self._handle.cancel()


def _chunk(chunk: StreamChunk) -> TokenChunk:
    return TokenChunk(
        chunk.index,
        chunk.text,
        chunk.token_ids,
        chunk.logprobs,
        chunk.finished,
        chunk.finish_reason,
        chunk.stop_reason,
        chunk.usage,
    )


def renamed(activity: EngineActivity, names: Mapping[int, int]) -> EngineActivity:
    """``activity`` with other ids. Of a sequence that has none, nothing is said."""

    def known(ids: Iterable[int]) -> tuple[int, ...]:
        return tuple([names[one] for one in ids if one in names])

    steps = tuple(
        [
            replace(
                step,
                prefills=tuple([(names[i], count) for i, count in step.prefills if i in names]),
                decodes=known(step.decodes),
                preempted=known(step.preempted),
                first_tokens=tuple(
                    [(names[i], waited) for i, waited in step.first_tokens if i in names]
                ),
            )
            for step in activity.steps
        ]
    )
    live = tuple(
        [
            replace(one, id=names[one.id], request_id=names[one.request_id])
            for one in activity.live
            if one.id in names and one.request_id in names
        ]
    )
    return replace(activity, steps=steps, live=live)
