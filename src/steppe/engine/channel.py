"""What the engine, its handles and its threads share: the inbox, the backlog and the live records.

It knows neither the runtime nor the engine, so a handle that outlives its engine stays safe and
keeps nothing heavy alive.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from steppe.engine.command_queue import CommandQueue
from steppe.engine.metrics import Counters

if TYPE_CHECKING:
    from steppe.engine.config import ShutdownMode
    from steppe.engine.record import RequestRecord
    from steppe.errors import SubmitRefusal

__all__ = ["Bell", "EngineChannel"]


class Bell:
    """Wakes one sleeping thread; rings that come while it is awake are one ring.

    ``ring`` is safe anywhere, also in a finalizer that the collector runs in the midst of any
    other code: it takes no lock that could be held.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Any thread: wake the sleeper, now or when it next goes to sleep."""
        # A lock can be released by anyone, so it serves as a binary semaphore.
        try:
            self._lock.release()
        except RuntimeError:
            return  # it has been rung already

    def wait(self, timeout: float | None = None) -> None:
        """The one sleeper: return at a ring, or after ``timeout`` seconds."""
        self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout))


class EngineChannel:
    """The meeting place of callers and actor. Any thread, except where stated.

    Backlog places are reserved before a record is registered, and a record is registered before it
    is posted, so a cancel by id that races the post finds it.
    """

    def __init__(
        self, capacity: int, max_pending: int, max_pending_tokens: int | None = None
    ) -> None:
        self.counters = Counters()
        self.bell = Bell()
        self.stop: ShutdownMode | None = None
        """Set once, after admission closed; a drain that ran out of time becomes a cancel."""
        self.failure: BaseException | None = None
        """What killed the engine. Set once, by ``terminate.fail_engine``."""
        self.changed = False
        """Some record was stopped since the actor last looked."""
        self.busy_since: float | None = None
        """When the runtime call in flight began, on the engine's clock. Written by the actor."""
        self.queued = 0
        self.resident = 0
        self._queue: CommandQueue[RequestRecord] = CommandQueue(capacity)
        self._gate = threading.Lock()
        self._accepting = True
        self._max_pending = max_pending
        self._pending = 0
        self._max_pending_tokens = max_pending_tokens
        self._pending_tokens = 0
        self._live: dict[int, RequestRecord] = {}
        self._next_id = 1

    def began(self, now: float) -> float:
        """Actor: a runtime call begins; the watchdog looks from here on. Returns ``now``."""
        self.busy_since = now
        return now

    # ---- the gate and the queue ------------------------------------------------------------------

    @property
    def accepting(self) -> bool:
        """Whether the gate is open."""
        return self._accepting

    @property
    def capacity(self) -> int:
        """Slots of the queue; also the most commands one boundary takes."""
        return self._queue.capacity

    @property
    def has_pending(self) -> bool:
        """Whether the queue holds something. Advisory."""
        return self._queue.has_pending

    @property
    def pending(self) -> int:
        """Sequences accepted and not yet terminal, wherever they are."""
        return self._pending

    @property
    def max_pending(self) -> int:
        """The most there may be of those."""
        return self._max_pending

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens of the sequences that were accepted and have no token yet."""
        return self._pending_tokens

    def no_room(self, places: int, tokens: int = 1) -> str | None:
        """Why so many places, for prompts of so many tokens in all, would not be had now, in words;
        None if they would. A prompt that none waits beside is never too long.
        """
        if self._pending + places > self._max_pending:
            return f"{self._max_pending} sequences are pending already"
        most, held = self._max_pending_tokens, self._pending_tokens
        if most is not None and held and held + tokens > most:
            return f"{held} prompt tokens are pending already, of at most {most}"
        return None

    def post_submit(self, record: RequestRecord) -> SubmitRefusal | None:
        """Put ``record`` into the queue if the gate is open; else say why not.

        Check and push are one operation: once ``close_admission`` has returned, whatever was
        accepted is in the queue, and nothing else will ever be.
        """
        with self._gate:
            if not self._accepting:
                return self.refusal()
            return None if self._queue.push(record) else "queue_full"

    def close_admission(self) -> None:
        """Close the gate for good."""
        with self._gate:
            self._accepting = False

    def slam(self) -> None:
        """Close the gate without the promise: for finalizers, which may wait for no lock."""
        self._accepting = False

    def refusal(self) -> SubmitRefusal:
        """Why the closed gate is closed."""
        return "shutting_down" if self.failure is None else "failed"

    def pop(self) -> RequestRecord | None:
        """Actor: the next posted record, or None."""
        return self._queue.pop()

    # ---- backlog and registry --------------------------------------------------------------------

    def reserve(self, places: int, tokens: int) -> str | None:
        """Take backlog places for prompts of so many tokens in all; or none, and say why."""
        with self._gate:
            reason = self.no_room(places, tokens)
            if reason is None:
                self._pending += places
                self._pending_tokens += tokens
            return reason

    def release(self, places: int, tokens: int) -> None:
        """Give backlog places back, or prompt tokens, or both."""
        with self._gate:
            self._pending -= places
            self._pending_tokens -= tokens

    def new_ids(self, count: int) -> int:
        """The first of ``count`` fresh ids in a row. None is ever 0 or used again."""
        with self._gate:
            first = self._next_id
            self._next_id += count
            return first

    def register(self, record: RequestRecord) -> None:
        """Make a record findable by its id."""
        self._live[record.id] = record

    def forget(self, request_id: int) -> None:
        """Undo ``register``. Unknown ids are fine."""
        self._live.pop(request_id, None)

    def live(self) -> list[RequestRecord]:
        """Every record that is registered now."""
        # One bytecode-atomic copy: records come and go on other threads.
        return list(self._live.values())

    def cancel_record(self, request_id: int) -> bool:
        """Plant the cancel flag of a live request; False for unknown and retired ids."""
        record = self._live.get(request_id)
        return record is not None and record.cancel()

    def notice(self) -> None:
        """Tell the actor that a record was stopped. The flag on the record comes first."""
        self.changed = True
        self.bell.ring()
