"""What the engine has done lately and is doing now, for whoever watches it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.stepping.types import ImmutableDecodeBatch, ImmutablePrefillBatch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steppe.engine.coordinator import RequestCoordinator
    from steppe.engine.planner import PlannerSnapshot
    from steppe.engine.record import RequestRecord, SequenceRecord
    from steppe.stepping.types import ImmutableStepBatch, RequestId, StepResult

__all__ = ["EngineActivity", "LiveSequence", "StepLog", "StepSummary", "live_sequences", "summary"]


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One step. ``number`` counts every step of the engine from 1; times are the engine clock's.

    ``prefills`` are (sequence id, prompt tokens), ``decodes`` the ids of the sequences that each
    decoded, ``tokens`` how many the step produced. ``first_tokens`` are (sequence id, seconds since
    its submission) of those that had none before. ``queued`` and ``resident`` are as the step
    began, as is ``free_pages`` (of ``page_size`` tokens; both None in the seed's order, where
    nothing is planned).
    """

    number: int
    began: float
    seconds: float
    prefills: tuple[tuple[RequestId, int], ...]
    decodes: tuple[RequestId, ...]
    preempted: tuple[RequestId, ...]
    first_tokens: tuple[tuple[RequestId, float], ...]
    tokens: int
    queued: int
    resident: int
    free_pages: int | None = None
    page_size: int | None = None


@dataclass(frozen=True, slots=True)
class LiveSequence:
    """One accepted sequence that has not ended.

    ``id`` is its own, as in ``StepSummary``; ``request_id`` is its request's, the one to cancel.
    ``seat`` is None while it waits. ``prompt_tokens`` is None for a prompt handed over as text.
    """

    id: RequestId
    request_id: RequestId
    seat: int | None
    submitted_at: float
    prompt_tokens: int | None
    tokens: int
    max_tokens: int | None
    stopping: bool


@dataclass(frozen=True, slots=True)
class EngineActivity:
    """A look at an engine: its clock, the steps asked for, who is in it."""

    now: float
    steps: tuple[StepSummary, ...]
    live: tuple[LiveSequence, ...]


class StepLog:
    """A ring of the last steps, written only while somebody looks.

    Each look keeps the log open for as many steps as the ring has places, so an engine that nobody
    watches pays for one comparison a step. The actor writes, any thread reads.
    """

    CAPACITY = 1024

    __slots__ = ("_left", "_ring")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[StepSummary] = deque(maxlen=capacity)
        self._left = 0

    @property
    def watched(self) -> bool:
        """Whether the next step is to be written."""
        return self._left > 0

    def add(self, step: StepSummary) -> None:
        """Actor: write a step."""
        # May undo the renewal of a reader that comes in between; its next look repeats it.
        self._left -= 1
        self._ring.append(step)

    def since(self, number: int) -> tuple[StepSummary, ...]:
        """Any thread: the steps after that number which are still here. Keeps the log open."""
        self._left = self._ring.maxlen or 0
        # One bytecode-atomic copy: the actor may write meanwhile.
        return tuple(step for step in self._ring.copy() if step.number > number)


def summary(
    number: int,
    began: float,
    seconds: float,
    seats: RequestCoordinator,
    before: PlannerSnapshot | None,
    batch: ImmutableStepBatch | ImmutablePrefillBatch | ImmutableDecodeBatch,
    result: StepResult,
    queued: int,
) -> StepSummary:
    """Describe a step that ran and is not committed yet: everyone in it still has a seat.

    Raises ExecutionError, as the commit would, for a result that names somebody unknown.
    """
    preempted: tuple[RequestId, ...] = ()
    if isinstance(batch, ImmutablePrefillBatch):
        sequence = seats.at(batch.target)
        prefills: tuple[tuple[RequestId, int], ...] = ((sequence.id, prompt_tokens(sequence) or 0),)
        decodes: tuple[RequestId, ...] = ()
    elif isinstance(batch, ImmutableDecodeBatch):
        prefills = ()
        decodes = tuple(seats.at(ref).id for ref in batch.residents)
    else:
        prefills = tuple((seats.at(one.ref).id, one.num_tokens) for one in batch.prefills)
        decodes = tuple(seats.at(one.ref).id for one in batch.decodes)
        preempted = tuple(seats.at(ref).id for ref in batch.preempt)
    first_tokens = []
    tokens = 0
    for ref, delta in result.deltas:
        if delta.token_ids:
            tokens += len(delta.token_ids)
            sequence = seats.at(ref)
            if not sequence.sent_ids:
                waited = began + seconds - sequence.record.submitted_at
                first_tokens.append((sequence.id, waited))
    return StepSummary(
        number,
        began,
        seconds,
        prefills,
        decodes,
        preempted,
        tuple(first_tokens),
        tokens,
        queued,
        len(seats),
        None if before is None else before.free_pages,
        None if before is None else before.page_size,
    )


def prompt_tokens(sequence: SequenceRecord) -> int | None:
    """How long its prompt is, where that is known without a tokenizer."""
    prompt = sequence.request.prompt
    return None if prompt is None or isinstance(prompt, str) else len(prompt)


def live_sequences(records: Iterable[RequestRecord]) -> tuple[LiveSequence, ...]:
    """Any thread: every sequence of ``records`` that has not ended, oldest first.

    Each is read while the actor may change it, so two fields of one may be a step apart.
    """
    return tuple(
        LiveSequence(
            sequence.id,
            record.id,
            None if (ref := sequence.ref) is None else ref.slot,
            record.submitted_at,
            prompt_tokens(sequence),
            sequence.sent_ids,
            sequence.request.params.max_tokens,
            record.stopped,
        )
        for record in records
        for sequence in record.sequences
        if sequence.index not in record.responses
    )
