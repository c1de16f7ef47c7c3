"""What a replica asks of whatever runs its requests: the seam between seed 003 and its backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from steppe.client import ModelCard
    from steppe.engine.activity import EngineActivity
    from steppe.replicas.vocabulary import ExecuteBatch, RunnerStatus, TokenChunk, TransportKind

__all__ = ["ModelRunner", "RunHandle"]


class RunHandle(Protocol):
    """The chunks of one accepted request. An async generator is one. For one reader.

    Ends after the chunk that carries ``usage``, or raises: RequestFailedError or a ReplicaError,
    DeadlineExceededError, RequestCancelledError. Whatever was not read is kept, merged, by the
    runner: a reader that stops reading holds up nobody else.
    """

    def __aiter__(self) -> Self:
        """Itself."""

    async def __anext__(self) -> TokenChunk:
        """The next chunk."""

    async def aclose(self) -> None:
        """Stop reading. A request that has not ended is cancelled: it takes part in one step more
        at the most. Idempotent; never raises.
        """


class ModelRunner(Protocol):
    """An engine, wherever it is (seed 003). One event loop; its owner is one ``EngineCoreActor``.

    Many requests run at once. A runner owns its own scheduling and its own limits; whoever calls it
    holds no lock around any of these.
    """

    @property
    def transport_kind(self) -> TransportKind:
        """Where the work is done."""

    @property
    def card(self) -> ModelCard:
        """The model. Raises SubmitError (``unavailable``) before the first ``start`` is over."""

    @property
    def reads_text(self) -> bool:
        """Whether prompts reach it as they were given. Else it only gets token ids."""

    async def start(self) -> None:
        """Load, or connect; ready when it returns. After a loss, called again: begin anew.

        Raises SteppeError; nothing is left running then. May be cancelled, with the same effect.
        """

    async def lost(self) -> Exception:
        """Wait until this runner can serve nothing more, and say why. May be cancelled.

        Every stream that is open then raises ReplicaLostError.
        """

    async def execute(self, batch: ExecuteBatch) -> RunHandle:
        """Hand a request over; returns when it is accepted, long before it is done.

        Raises InvalidRequestError and its kin, SubmitError, ReplicaError: it was never started.
        Cancelled while it waits, it leaves nothing running.
        """

    async def status(self) -> RunnerStatus:
        """A look at it, through the same way that requests take: one that hangs does not answer."""

    async def activity(self, after: int = 0) -> EngineActivity:
        """Who has not ended, under the ids of their batches, and the steps after that number."""

    async def close(self) -> None:
        """End it now, whatever it is doing, and release what it holds. Idempotent."""
