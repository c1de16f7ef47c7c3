"""What the engine asks of a runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from steppe.request import LLMGenerationRequest
    from steppe.stepping.execution import SteppedExecution
    from steppe.stepping.types import RequestId

__all__ = ["SteppedRuntime"]


class SteppedRuntime(Protocol):
    """What the engine asks of a runtime. Only the actor calls ``begin_stepped``.

    A runtime may have more, which the engine uses when it is there: ``validate(request)``, on any
    thread, raises InvalidRequestError (or a subclass) for what it can never serve, and may return a
    prepared request to use instead; ``set_overcommit(flag)``, before anything runs, chooses between
    reserving memory for a whole request and for its prompt; ``read_context_cache()``, on any
    thread, returns its ContextCacheMetrics or None; ``close()`` is the actor's last call.
    """

    @property
    def supports_seated_admission(self) -> bool:
        """Whether requests can join a running batch."""

    @property
    def max_batch_size(self) -> int:
        """Seats of a batch."""

    @property
    def world_size(self) -> int:
        """Ranks. More than one need ``parallel_stepping`` to be true."""

    def begin_stepped(
        self, request: LLMGenerationRequest, request_id: RequestId
    ) -> SteppedExecution | None:
        """Open a batch and seat its founder, whose prefill has not run. None: refused."""
