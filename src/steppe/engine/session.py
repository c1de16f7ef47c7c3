"""One open batch, as the actor keeps it between boundaries."""

from __future__ import annotations

from operator import le
from typing import TYPE_CHECKING

from steppe.engine.compatibility import BatchCompatibility
from steppe.engine.coordinator import RequestCoordinator
from steppe.errors import ExecutionError
from steppe.request import FinishReason

if TYPE_CHECKING:
    from steppe.engine.record import SequenceRecord
    from steppe.request import LLMGenerationRequest
    from steppe.stepping.execution import SteppedExecution
    from steppe.stepping.types import DecodeEntry, ResidentNeed, ResidentRef

__all__ = ["Session"]


class Session:
    """An execution, who sits in it, and what the next boundary must remember. The actor's alone."""

    def __init__(self, execution: SteppedExecution, request: LLMGenerationRequest) -> None:
        self.execution = execution
        self.request = request
        self.seats = RequestCoordinator()
        self.compatibility = BatchCompatibility(execution.batch_fields)
        self.next_index = 1
        """The original index of the next joiner; the founder was 0."""
        self.founder: ResidentRef | None = None
        """Until its prefill has run."""
        self.joiner: ResidentRef | None = None
        """Whoever was seated last and, in the seed's order, must prefill next."""
        self.stopped = False
        """Some resident may have been stopped."""
        self.short_of_pages = False
        """In the last step somebody lacked a page."""
        self.preempted: set[SequenceRecord] = set()
        """Those that will come back."""
        self.lost = False
        self.entries: dict[int, DecodeEntry] = {}
        """The planner's memo."""

    def by_age(self, needs: tuple[ResidentNeed, ...]) -> tuple[ResidentNeed, ...]:
        """``needs``, the longest seated first. Raises ExecutionError for somebody unknown here."""
        ranks = self.seats.ranks
        try:
            ages = [ranks[need.ref.slot] for need in needs]
        except KeyError as error:
            raise ExecutionError(f"seat {error} is nobody's") from None
        if all(map(le, ages, ages[1:])):
            return needs
        return tuple(sorted(needs, key=lambda need: ranks[need.ref.slot]))

    def to_retire(self) -> tuple[tuple[ResidentRef, FinishReason], ...]:
        """Every resident whose request was cancelled or has ended."""
        if not self.stopped:
            return ()
        self.stopped = False
        leaving = []
        for sequence in self.seats:
            record = sequence.record
            if record.stopped and sequence.ref is not None:
                cancelled = record.cancelled or record.live
                reason = FinishReason.CANCELLED if cancelled else FinishReason.ERROR
                leaving.append((sequence.ref, reason))
        return tuple(leaving)

    def plant_flags(self) -> None:
        """For an execution that watches its channels: flag those whose request has ended."""
        self.stopped = False
        for sequence in self.seats:
            if sequence.record.stopped:
                sequence.record.channel.cancel()

    def headroom_for(self, sequence: SequenceRecord) -> bool:
        """Whether seating ``sequence`` now would leave room for those who sit already.

        Only asked of a pool that was found dry before: then one page must be left for everybody,
        and twice as many after each time that ``sequence`` was preempted, or it would soon be
        preempted again.
        """
        if not (self.short_of_pages or self.preempted) or not len(self.seats):
            return True
        known = self.execution.snapshot()
        if known is None:
            return True
        pages = len(self.seats) << min(sequence.preemptions, 16)
        if (seed := sequence.resume) is not None:
            pages += -(-(len(seed.prompt_token_ids) + len(seed.generated)) // known.page_size)
        return known.free_pages >= pages
