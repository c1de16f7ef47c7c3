"""The words of seed 003: what a replica is asked to run, what comes back, and its states."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from steppe.streaming import StreamChunk

if TYPE_CHECKING:
    from steppe.engine.config import EngineHealth
    from steppe.engine.metrics import EngineMetrics
    from steppe.request import LLMGenerationRequest, TokenLogprob
    from steppe.stepping.cache_metrics import ContextCacheMetrics

__all__ = ["ExecuteBatch", "ReplicaState", "RunnerStatus", "TokenChunk", "TransportKind"]


class TransportKind(StrEnum):
    """Where a runner's work is done. Nothing is decided by it; it says what may go wrong."""

    LOCAL_CPU = "local_cpu"
    LOCAL_GPU = "local_gpu"
    REMOTE_NETWORK = "remote_network"


class ReplicaState(StrEnum):
    """What a replica is doing. Only READY takes requests.

    LOADING: its runner starts, for the first time or again. DRAINING: it finishes what it has.
    FAILED: its runner was lost too often, or refused to start; it stays so. STOPPED: it has ended.
    """

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ExecuteBatch:
    """One request for a runner (the seed's name; a request may be several sequences).

    ``request_id`` is unique among all that its client sends; sequence i of it has that id plus i.
    """

    request_id: int
    request: LLMGenerationRequest

    @property
    def places(self) -> int:
        """How many sequences it counts as, wherever sequences are bounded."""
        return self.request.params.n


@dataclass(frozen=True, slots=True)
class TokenChunk(StreamChunk):
    """A ``StreamChunk``, and on the one that ends the request (the one with ``usage``) what only
    its end has: so that the chunks of a request alone make its whole response.
    """

    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    embedding: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class RunnerStatus:
    """A runner's answer to a probe. Its counters begin at zero each time it starts.

    ``cache`` is None where its engine keeps no computed prefixes, or does not tell.
    """

    health: EngineHealth
    metrics: EngineMetrics
    cache: ContextCacheMetrics | None = None
