"""Seats of a batch, each with an epoch, so that a name never means its seat's next occupant."""

from __future__ import annotations

from steppe.errors import ExecutionError
from steppe.stepping.types import ResidentRef

__all__ = ["ResidentSlots"]


class ResidentSlots:
    """A fixed number of seats. One thread.

    Seats are first handed out lowest first; a seat that was given back is the next to be handed
    out. Epochs start at 1 and rise whenever a seat is given back, so a ``ResidentRef`` is never
    confused with a later occupant of the same seat. Give a seat back only after everything that
    touches it has run.
    """

    def __init__(self, capacity: int) -> None:
        self._epochs: list[int] = []
        self._free: list[int] = []
        self._taken: list[bool] = []
        self.reset(capacity)

    @property
    def capacity(self) -> int:
        """How many seats there are."""
        return len(self._epochs)

    @property
    def free(self) -> int:
        """How many seats nobody holds."""
        return len(self._free)

    def reset(self, capacity: int) -> None:
        """Start over with ``capacity`` seats, all free. Names handed out before match nothing.

        Raises ExecutionError for a negative capacity.
        """
        if capacity < 0:
            raise ExecutionError(f"a batch cannot have {capacity} seats")
        # Epochs never start over: a name from before the reset must stay stale.
        first = max(self._epochs, default=0) + 1
        self._epochs = [first] * capacity
        self._taken = [False] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    def acquire(self) -> ResidentRef | None:
        """Take a seat; None when all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._taken[slot] = True
        return ResidentRef(slot, self._epochs[slot])

    def contains(self, ref: ResidentRef) -> bool:
        """Whether ``ref`` names the present occupant of its seat."""
        slot = ref.slot
        return (
            0 <= slot < len(self._epochs) and self._taken[slot] and self._epochs[slot] == ref.epoch
        )

    def release(self, ref: ResidentRef) -> bool:
        """Give a seat back. False, and nothing happens, when ``ref`` is stale."""
        if not self.contains(ref):
            return False
        self._epochs[ref.slot] += 1
        self._taken[ref.slot] = False
        self._free.append(ref.slot)
        return True
