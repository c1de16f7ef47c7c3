"""A bounded queue of many producers and one consumer."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from steppe.errors import ConfigError

__all__ = ["MIN_CAPACITY", "CommandQueue"]

MIN_CAPACITY = 2

T = TypeVar("T")


class CommandQueue(Generic[T]):
    """First in, first out, never larger than ``capacity``, which is a power of two.

    Any thread may push; one thread pops. Neither ever waits for the other. A push into a full queue
    is refused and leaves nothing behind. Raises ConfigError for a capacity below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError("command_queue_capacity", f"must be at least 1, not {capacity}")
        self._capacity = 1 << (max(capacity, MIN_CAPACITY) - 1).bit_length()
        self._lock = threading.Lock()
        self._items: deque[T] = deque()

    @property
    def capacity(self) -> int:
        """How many commands fit; also the most that one boundary takes out."""
        return self._capacity

    @property
    def has_pending(self) -> bool:
        """Whether something waits. By the time the caller looks, it may not."""
        return bool(self._items)

    def push(self, item: T) -> bool:
        """Append ``item``; False when full."""
        with self._lock:
            if len(self._items) >= self._capacity:
                return False
            self._items.append(item)
            return True

    def pop(self) -> T | None:
        """The oldest command, or None."""
        # Taking from a deque is atomic, and there is one consumer: no lock on this side.
        return self._items.popleft() if self._items else None
