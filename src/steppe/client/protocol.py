"""What a server or a replica asks of an engine, wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from steppe.client.text import TextService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from steppe.engine.activity import EngineActivity
    from steppe.engine.config import EngineHealth
    from steppe.engine.metrics import EngineMetrics
    from steppe.request import LLMGenerationRequest, LLMGenerationResponse
    from steppe.stepping.cache_metrics import ContextCacheMetrics
    from steppe.streaming import StreamChunk
    from steppe.text.reasoning.families import ReasoningFormat
    from steppe.text.tools.parser import ToolFormat

__all__ = ["ClientHandle", "EngineClient", "ModelCard", "ReplicaReport"]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a client may know of the model: sizes are in tokens.

    ``generation_defaults`` are the sampling fields that the model itself sets; ``cache_tokens`` is
    how many tokens the page pool holds, ``max_pending_tokens`` how many prompt tokens may wait
    beside others, where that is known. ``reasoning`` and ``tools`` are how
    the model marks what it thinks and what it calls, where that is known. ``scheduling`` is the
    engine's: only a fair one knows priorities.
    """

    name: str
    context_length: int
    vocab_size: int
    max_batch_size: int
    max_pending: int
    has_chat_template: bool
    generation_defaults: Mapping[str, int | float] = field(default_factory=dict)
    cache_tokens: int | None = None
    max_pending_tokens: int | None = None
    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    scheduling: Literal["fcfs", "fair"] = "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """One of several engines behind a client, as it is now.

    ``transport`` is where it runs, ``state`` what it does (loading, ready, draining, failed,
    stopped); ``in_rotation`` says whether it gets requests. ``generation`` counts its starts.
    ``in_flight`` of ``max_concurrent`` sequences are accepted and not terminal, ``load`` is their
    quotient. The counters are of requests, ``refused`` by reason; ``preemptions`` and ``cache``,
    None where it does not tell, are as of the last probe. ``cause`` is what it was lost to last.
    """

    name: str
    transport: str
    state: str
    in_rotation: bool
    generation: int
    load: float
    in_flight: int
    max_concurrent: int
    submitted: int
    completed: int
    cancelled: int
    failed: int
    tokens: int
    preemptions: int
    cache: ContextCacheMetrics | None
    refused: Mapping[str, int]
    cause: str | None = None


class ClientHandle(Protocol):
    """One accepted request. For one reader; ``cancel`` is for any thread."""

    @property
    def id(self) -> int:
        """The engine's own id, never used again."""

    @property
    def ready(self) -> bool:
        """Whether the request has an outcome."""

    def __aiter__(self) -> AsyncIterator[StreamChunk]:
        """Its chunks. Leaving the loop early cancels it; at the end, raises as ``result`` does."""

    async def result(self) -> LLMGenerationResponse:
        """The whole response. Raises RequestCancelledError, RequestFailedError."""

    def cancel(self) -> None:
        """Ask for an end. Never blocks; without effect on a request that has ended."""


class EngineClient(TextService, Protocol):
    """Everything a server asks of an engine. For one event loop."""

    @property
    def card(self) -> ModelCard:
        """The model behind it."""

    @property
    def accepting(self) -> bool:
        """False once it drains, or the engine has failed."""

    def check_room(self, sequences: int) -> None:
        """Raise SubmitError if that many more would be refused now, before work is done.

        Raises UnsupportedRequestError (``n``) for more than there may ever be.
        """

    async def submit(self, request: LLMGenerationRequest) -> ClientHandle:
        """Hand a request over. Raises InvalidRequestError and its kin, SubmitError."""

    def cancel(self, request_id: int) -> None:
        """Cancel by id; unknown and retired ids are ignored."""

    def cancel_all(self) -> None:
        """Cancel everything this client has submitted."""

    def retry_after(self) -> float:
        """Seconds after which a refused request is likely to find room, from measured service."""

    async def health(self) -> EngineHealth:
        """Whether tokens are flowing."""

    async def metrics(self) -> EngineMetrics:
        """The engine's counters."""

    async def context_cache_metrics(self) -> ContextCacheMetrics | None:
        """Reuse of computed prefixes; None where that is not known."""

    async def activity(self, after: int = 0) -> EngineActivity:
        """Who has not ended, and the steps after that number; see ``RequestEngine.activity``."""

    def replicas(self) -> Sequence[ReplicaReport]:
        """The engines behind it, where there are several."""

    async def drain(self, patience: float | None) -> None:
        """Accept nothing more, finish what runs, cancel what is left after ``patience`` seconds."""
