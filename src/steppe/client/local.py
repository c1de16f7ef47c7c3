"""An ``EngineClient`` over an engine in this process."""

from __future__ import annotations

import asyncio
import time
import weakref
from typing import TYPE_CHECKING, Self

from steppe.client.protocol import ModelCard
from steppe.client.rate import ServiceRate
from steppe.client.text import LocalText, WithText, with_ids
from steppe.engine.config import ShutdownMode
from steppe.errors import (
    EngineFailedError,
    SubmitError,
    UnsupportedRequestError,
)
from steppe.text.reasoning.families import reasoning_format
from steppe.text.tools.families import tool_format

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from steppe.client.protocol import ReplicaReport
    from steppe.engine.activity import EngineActivity
    from steppe.engine.config import EngineHealth
    from steppe.engine.handle import RequestHandle
    from steppe.engine.metrics import EngineMetrics
    from steppe.engine.request_engine import RequestEngine
    from steppe.llm import LLM
    from steppe.request import LLMGenerationRequest, LLMGenerationResponse
    from steppe.stepping.cache_metrics import ContextCacheMetrics
    from steppe.streaming import StreamChunk
    from steppe.text.chat_template import ChatTemplate
    from steppe.text.tokenizer import Tokenizer

__all__ = ["LocalClient", "LocalHandle"]


class LocalHandle:
    """A ``ClientHandle`` over an engine in this process."""

    __slots__ = ("__weakref__", "_handle")

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle

    @property
    def id(self) -> int:
        return self._handle.id

    @property
    def ready(self) -> bool:
        return self._handle.ready

    def __aiter__(self) -> AsyncIterator[StreamChunk]:
        return self._handle.__aiter__()

    async def result(self) -> LLMGenerationResponse:
        try:
            return await self._handle
        except asyncio.CancelledError:
            self._handle.cancel()
            raise

    def cancel(self) -> None:
        self._handle.cancel()


class LocalClient(WithText[LocalText]):
    """An ``EngineClient`` over a ``RequestEngine`` in this process."""

    def __init__(
        self,
        engine: RequestEngine,
        *,
        tokenizer: Tokenizer,
        card: ModelCard,
        chat_template: ChatTemplate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(LocalText(tokenizer, chat_template, name=card.name))
        self._engine = engine
        self._card = card
        self._live: weakref.WeakSet[LocalHandle] = weakref.WeakSet()
        self._preparing = 0
        self._rate = ServiceRate(clock)

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """The client of a loaded model."""
        templates = {} if llm.chat_template is None else llm.chat_template.sources
        card = ModelCard(
            name=llm.name,
            context_length=llm.context_length,
            vocab_size=llm.tokenizer.vocab_size,
            max_batch_size=llm.max_batch_size,
            max_pending=llm.engine.max_pending,
            has_chat_template=llm.chat_template is not None,
            generation_defaults=llm.generation_defaults,
            cache_tokens=llm.cache_tokens,
            max_pending_tokens=llm.engine.max_pending_tokens,
            reasoning=reasoning_format(templates),
            tools=tool_format(templates),
            scheduling=llm.scheduling,
        )
        return cls(llm.engine, tokenizer=llm.tokenizer, card=card, chat_template=llm.chat_template)

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def accepting(self) -> bool:
        return self._engine.running

    # ---- requests --------------------------------------------------------------------------------

    def check_room(self, sequences: int) -> None:
        engine = self._engine
        if sequences > engine.max_pending:
            raise UnsupportedRequestError(
                "n", f"{sequences} sequences, and no more than {engine.max_pending} may be pending"
            )
        if not engine.running:
            health = engine.health()
            if health.state == "failed":
                raise EngineFailedError(f"the engine has failed: {health.cause}")
            raise SubmitError("shutting_down", "the engine is shutting down")
        if reason := engine.no_room(self._preparing + self._text.preparing + sequences):
            raise SubmitError("backlog_full", reason)

    async def submit(self, request: LLMGenerationRequest) -> LocalHandle:
        request.check_single()
        request = await with_ids(request, self)
        self._observe()
        if request.params.guided is None:
            handle = LocalHandle(self._engine.submit(request))
        else:
            handle = LocalHandle(await self._submit_guided(request))
        self._live.add(handle)
        return handle

    async def _submit_guided(self, request: LLMGenerationRequest) -> RequestHandle:
        """Submit in a thread, where compiling a grammar holds up nobody else.

        Whoever stops waiting for that gives up the request.
        """
        self._preparing += request.params.n
        work = asyncio.get_running_loop().run_in_executor(None, self._engine.submit, request)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_give_up)
            raise
        finally:
            self._preparing -= request.params.n

    def cancel(self, request_id: int) -> None:
        self._engine.cancel(request_id)

    def cancel_all(self) -> None:
        for handle in list(self._live):
            handle.cancel()

    def retry_after(self) -> float:
        self._observe()
        return self._rate.seconds_for(self._engine.pending / 2)

    def _observe(self) -> None:
        metrics = self._engine.metrics()
        self._rate.observe(metrics.completed + metrics.cancelled + metrics.failed)

    # ---- state and the end -----------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        return self._engine.health()

    async def metrics(self) -> EngineMetrics:
        return self._engine.metrics()

    async def context_cache_metrics(self) -> ContextCacheMetrics | None:
        return self._engine.context_cache_metrics()

    async def activity(self, after: int = 0) -> EngineActivity:
        return self._engine.activity(after)

    def replicas(self) -> Sequence[ReplicaReport]:
        return ()

    async def drain(self, patience: float | None) -> None:
        # A thread of its own: the tokenizing ones may all be busy.
        await asyncio.to_thread(self._engine.shutdown, ShutdownMode.DRAIN, timeout=patience)
        self._text.close()


def _give_up(submitted: asyncio.Future[RequestHandle]) -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().cancel()
