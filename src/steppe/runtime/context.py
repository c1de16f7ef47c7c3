"""Who is seated: the residents of one generation, in execution order (seed 002)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.errors import ExecutionError
from steppe.runtime.sequence import SequenceState, TextState
from steppe.stepping.types import SequenceIdentity

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.runtime.kv.managed import ManagedKVCacheRequest
    from steppe.stepping.resident_slots import ResidentSlots
    from steppe.stepping.types import ResidentRef, SlotSeed
    from steppe.text.pipeline import TextPipeline

__all__ = ["DecodingInferenceContext"]


class DecodingInferenceContext:
    """Seats, their sequences and the leases these hold. Actor thread only.

    ``residents`` keep their order for life; a seat freed and taken again has another epoch.
    """

    def __init__(
        self,
        slots: ResidentSlots,
        managed_request: ManagedKVCacheRequest,
        text_pipeline: Callable[[SlotSeed], TextPipeline],
    ) -> None:
        self._slots = slots
        self._managed = managed_request
        self._text_pipeline = text_pipeline
        self._residents: list[SequenceState] = []
        self._by_slot: dict[int, SequenceState] = {}

    @property
    def residents(self) -> list[SequenceState]:
        """The seated sequences in execution order. Not to be changed by the caller."""
        return self._residents

    def find(self, ref: ResidentRef) -> SequenceState:
        """The resident a reference names. Raises ExecutionError for a stale or unknown one."""
        sequence = self._by_slot.get(ref.slot)
        if sequence is None or (sequence.ref is not ref and sequence.ref != ref):
            raise ExecutionError(f"no resident is {ref}")
        return sequence

    def seat(self, seed: SlotSeed, reserve_tokens: int) -> SequenceState | None:
        """Seat a sequence with room for ``reserve_tokens``; None, and nothing changed, without
        room.

        Raises ExecutionError for an index that is seated already.
        """
        if any(other.seed.original_index == seed.original_index for other in self._residents):
            raise ExecutionError(f"index {seed.original_index} is seated already")
        text = seed.text_state
        if not isinstance(text, TextState):
            text = TextState(self._text_pipeline(seed), [])
        prefix = self._managed.look_up(seed)
        lease = self._managed.acquire(reserve_tokens, prefix)
        if lease is None:
            return None
        ref = self._slots.acquire()
        if ref is None:
            self._managed.release(lease)
            return None
        identity = SequenceIdentity(seed.request_id, ref)
        sequence = SequenceState(seed, identity, lease, text, prefix)
        if prefix.num_pages:
            sequence.take_computed(prefix.num_pages * self._managed.pool.page_size)
        self._managed.cache.admitted(sequence)
        self._managed.cache.restore(sequence)
        self._residents.append(sequence)
        self._by_slot[ref.slot] = sequence
        return sequence

    def unseat(self, sequence: SequenceState) -> None:
        """Free a sequence's seat and pages."""
        del self._by_slot[sequence.ref.slot]
        self._residents.remove(sequence)
        self._slots.release(sequence.ref)
        self._managed.release(sequence.lease)
        self._managed.cache.left(sequence)

    def clear(self) -> None:
        """Unseat everybody."""
        for sequence in tuple(self._residents):
            self.unseat(sequence)
