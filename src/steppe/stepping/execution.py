"""What an engine drives: one open batch, advanced by typed operations (seed 001).

The engine calls down and reads return values; an execution never calls back. One thread drives an
execution, the one that owns its runtime.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from steppe.errors import ExecutionError
from steppe.stepping.types import ImmutableDecodeBatch, ImmutablePrefillBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.request import LLMGenerationRequest, LLMGenerationResponse
    from steppe.stepping.types import (
        AdmissionResult,
        BatchResult,
        ExecutionSnapshot,
        ImmutableStepBatch,
        RequestId,
        ResidentRef,
        SlotSeed,
        StepResult,
    )
    from steppe.streaming import StreamChannel

__all__ = ["SteppedExecution"]


class SteppedExecution(ABC):
    """An open batch: who is in it, and the operations that change that (seed 001, DESIGN 3.1).

    Seven methods are the seed's and must be written. An execution that stops there is driven in
    the seed's order: the prefill of whoever was just admitted, else one decode of everybody; it
    watches ``stream_channel.cancelled`` of its requests at every step. One that sets
    ``mixed_steps`` writes ``step`` and ``snapshot`` as well, is driven through ``step`` alone, and
    reads no flag: every cancellation reaches it as a field of a batch.

    Whatever an operation raises ends this batch and nothing else, except ExecutionLostError, which
    says that no further batch can run either.
    """

    mixed_steps: bool = False
    """Whether ``step`` runs decodes and prompt chunks together."""
    batch_fields: frozenset[str] = frozenset()
    """Request fields (``params.temperature``) in which every joiner must equal the founder."""

    @abstractmethod
    def residents(self) -> Sequence[ResidentRef]:
        """Every live resident, in execution order. The founder is the first of a new execution."""

    @abstractmethod
    def admit(
        self,
        request: LLMGenerationRequest,
        original_index: int,
        request_id: RequestId,
        *,
        resume: SlotSeed | None = None,
    ) -> AdmissionResult:
        """Seat one sequence. Anything but ADMITTED has changed nothing at all.

        ``request`` has ``n`` = 1 and a ``stream_channel``; ``request_id`` names this sequence
        alone, and is the same at every attempt, so what a refused attempt computed can be kept for
        the next. ``resume`` is passed only to an execution that preempts: it seats a sequence that
        ``step`` preempted before, possibly into an execution that nobody is left in. A seated
        sequence has computed nothing yet.
        """

    @abstractmethod
    def prefill(self, batch: ImmutablePrefillBatch) -> StepResult:
        """Run the prompt of the newest resident, or of the founder. Comes right after its admit."""

    @abstractmethod
    def decode(self, batch: ImmutableDecodeBatch) -> StepResult:
        """One more token for everybody. ``batch`` names all residents, in execution order."""

    @abstractmethod
    def materialize(
        self, result: BatchResult, stop_strings: Sequence[str]
    ) -> LLMGenerationResponse:
        """The response, of one output, that a finished sequence amounts to. Changes nothing."""

    @abstractmethod
    def finish(self) -> LLMGenerationResponse | None:
        """End the session. Called once, when no residents remain, unless ``abort`` was."""

    @abstractmethod
    def abort(self) -> None:
        """Drop the session with everybody in it. Idempotent; never raises."""

    # ---- beyond the seed -------------------------------------------------------------------------

    def snapshot(self) -> ExecutionSnapshot | None:
        """What a planner must know about memory and about each resident's next step.

        An execution with ``mixed_steps`` must answer; None is "drive me in the seed's order, and
        never preempt".
        """
        return None

    def channel(self, ref: ResidentRef) -> StreamChannel | None:
        """The stream channel of a resident's request, if this execution keeps it.

        Only the default ``step`` asks, to retire somebody.
        """
        return None

    def step(self, batch: ImmutableStepBatch) -> StepResult:
        """Retire, preempt, then run one pass over decodes and prompt chunks.

        The result must list every retired resident in ``finished`` (with the reason the batch
        gave) and every preempted one in ``preempted``, their seats and pages free by the return.

        This default is made of the seed's operations: it plants the cancel flag of whoever is to
        retire, so that the next operation evicts them, and then runs the first prefill of the batch
        whole, or a decode of everybody. Raises ExecutionError when asked to preempt, or to retire
        somebody whose channel it does not know.
        """
        if batch.preempt:
            raise ExecutionError(f"{type(self).__name__} cannot preempt")
        for ref, _ in batch.retire:
            channel = self.channel(ref)
            if channel is None:
                raise ExecutionError(f"{type(self).__name__} cannot retire {ref}")
            channel.cancel()
        if batch.prefills:
            return self.prefill(ImmutablePrefillBatch(batch.prefills[0].ref))
        return self.decode(ImmutableDecodeBatch(tuple(self.residents())))
