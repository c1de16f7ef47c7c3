"""The resident table, and the commit of a step's result to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from steppe.errors import ExecutionError
from steppe.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from steppe.engine.record import SequenceRecord
    from steppe.request import LLMGenerationResponse
    from steppe.stepping.execution import SteppedExecution
    from steppe.stepping.types import (
        BatchResult,
        ImmutableStepBatch,
        ResidentRef,
        SlotSeed,
        StepResult,
        TokenDelta,
    )

__all__ = ["Commit", "FinishedSequence", "RequestCoordinator"]


@dataclass(slots=True)
class FinishedSequence:
    """A sequence that left. ``response`` is None for one that was cancelled or died."""

    sequence: SequenceRecord
    result: BatchResult
    response: LLMGenerationResponse | None
    delta: TokenDelta | None = None


@dataclass(slots=True)
class Commit:
    """What a step meant for the sequences of the table."""

    survivors: list[tuple[SequenceRecord, TokenDelta]] = field(default_factory=list)
    finished: list[FinishedSequence] = field(default_factory=list)
    preempted: list[tuple[SequenceRecord, SlotSeed]] = field(default_factory=list)


class RequestCoordinator:
    """Who sits where. The actor's alone.

    ``commit`` is all or nothing: it first checks every name in the result and materialises the
    responses, and changes the table only when none of that can fail any more.
    """

    def __init__(self) -> None:
        self._seats: dict[int, SequenceRecord] = {}
        self.ranks: dict[int, int] = {}
        """How early the occupant of each seat was first seated."""

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[SequenceRecord]:
        return iter(self._seats.values())

    def at(self, ref: ResidentRef) -> SequenceRecord:
        """The sequence in that seat. Raises ExecutionError for a stale or unknown name."""
        sequence = self._seats.get(ref.slot)
        if sequence is None or (sequence.ref is not ref and sequence.ref != ref):
            raise ExecutionError(f"nobody is known as {ref}")
        return sequence

    def add(self, sequence: SequenceRecord, ref: ResidentRef) -> None:
        """Seat a sequence. Raises ExecutionError if the seat is taken, or names nobody."""
        if ref.slot < 0 or ref.epoch < 1:
            raise ExecutionError(f"{ref} is no seat")
        if ref.slot in self._seats:
            raise ExecutionError(f"seat {ref.slot} is taken")
        sequence.ref = ref
        self._seats[ref.slot] = sequence
        self.ranks[ref.slot] = sequence.rank

    def commit(
        self,
        result: StepResult,
        execution: SteppedExecution,
        batch: ImmutableStepBatch | None = None,
    ) -> Commit:
        """Take in what a step did.

        With ``batch`` (the mixed step that was run) everyone whom it retired or preempted must be
        reported. Raises ExecutionError for a result that contradicts the table, and whatever
        ``materialize`` raises; the table is unchanged then.
        """
        done: dict[int, FinishedSequence] = {}
        for ref, snapshot in result.finished:
            sequence = self.at(ref)
            if ref.slot in done:
                raise ExecutionError(f"{ref} finished twice in one step")
            if snapshot.request_id != sequence.id:
                raise ExecutionError(
                    f"{ref} is request {sequence.id}, its result says {snapshot.request_id}"
                )
            response = None
            wanted = snapshot.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
            if wanted and not sequence.record.stopped:
                response = execution.materialize(snapshot, sequence.request.params.stop)
            done[ref.slot] = FinishedSequence(sequence, snapshot, response)
        commit = Commit(finished=list(done.values()))
        survivors, seats = commit.survivors, self._seats
        for ref, delta in result.deltas:
            seated = seats.get(ref.slot)
            if seated is None or (seated.ref is not ref and seated.ref != ref):
                raise ExecutionError(f"tokens for {ref}, and nobody is known by that name")
            if done and ref.slot in done:
                done[ref.slot].delta = delta
            else:
                survivors.append((seated, delta))
        for ref, seed in result.preempted:
            commit.preempted.append((self.at(ref), seed))
        if batch is not None and result.ok:
            self._check_departures(result, batch)

        # Nothing below can fail.
        for slot in done:
            del seats[slot]
        for sequence, seed in commit.preempted:
            assert sequence.ref is not None
            del seats[sequence.ref.slot]
            sequence.ref = None
            sequence.resume = seed
        return commit

    @staticmethod
    def _check_departures(result: StepResult, batch: ImmutableStepBatch) -> None:
        if batch.retire:
            reported = {ref for ref, _ in result.finished}
            for ref, _ in batch.retire:
                if ref not in reported:
                    raise ExecutionError(f"{ref} was to retire and did not")
        if batch.preempt or result.preempted:
            reported = {ref for ref, _ in result.preempted}
            if reported != set(batch.preempt) or len(reported) != len(result.preempted):
                raise ExecutionError("others were preempted than were to be")

    def clear(self) -> list[SequenceRecord]:
        """Everyone leaves; returns who they were."""
        everyone = list(self._seats.values())
        self._seats.clear()
        return everyone
