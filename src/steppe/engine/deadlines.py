"""Time limits of requests and of steps.

The actor looks at every boundary. A thread of its own, started when the first limit appears,
answers callers whose time is up while a step hangs; a manual engine has none.
"""

from __future__ import annotations

import heapq
import threading
import time
from typing import TYPE_CHECKING

from steppe.engine.channel import Bell
from steppe.engine.record import Outcome, TerminalStatus
from steppe.engine.terminate import fail_engine, terminate
from steppe.errors import DeadlineExceededError, ExecutionLostError

if TYPE_CHECKING:
    from steppe.engine.channel import EngineChannel
    from steppe.engine.config import EngineConfig
    from steppe.engine.record import RequestRecord

__all__ = ["Deadlines"]


class Deadlines:
    """The deadlines of live requests, and the watchdog of the step in flight. Any thread."""

    def __init__(self, shared: EngineChannel, config: EngineConfig, *, threaded: bool) -> None:
        self._shared = shared
        self._clock = config.clock
        self._hang_limit = config.hang_limit
        # Nobody tells a sleeping thread that a foreign clock moved: look around now and then.
        self._nap = None if config.clock is time.monotonic else config.idle_wait
        self._threaded = threaded
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, str, RequestRecord]] = []
        self._entries = 0
        self._bell = Bell()
        self._stopped = False
        self._thread: threading.Thread | None = None
        if self._hang_limit is not None:
            self._start()

    @property
    def thread(self) -> threading.Thread | None:
        """The thread, if it was ever needed."""
        return self._thread

    @property
    def watching(self) -> bool:
        """Whether any limit is watched."""
        return bool(self._heap)

    def add(self, record: RequestRecord) -> None:
        """Watch the time limits of a request, if it has any."""
        request, start = record.request, record.submitted_at
        limits = [
            (name, start + seconds)
            for name, seconds in (
                ("queue", request.queue_timeout),
                ("first_token", request.first_token_timeout),
                ("total", request.timeout),
            )
            if seconds is not None
        ]
        if not limits:
            return
        with self._lock:
            if len(self._heap) > 64 + 4 * self._shared.pending:
                # Most of these requests are long over; do not wait for their times to come.
                self._heap = [entry for entry in self._heap if not _moot(entry[3], entry[2])]
                heapq.heapify(self._heap)
            for name, when in limits:
                self._entries += 1
                heapq.heappush(self._heap, (when, self._entries, name, record))
        self._start()
        self._bell.ring()

    def poll(self) -> bool:
        """Answer every caller whose time is up, and look at the step in flight. Did any change?"""
        now = self._clock()
        changed = False
        while True:
            with self._lock:
                if not self._heap or self._heap[0][0] > now:
                    break
                _, _, name, record = heapq.heappop(self._heap)
            if not _moot(record, name):
                changed |= self._expire(record, name)
        if self._hang_limit is not None and self._shared.failure is None:
            since = self._shared.busy_since
            if since is not None and now - since > self._hang_limit:
                fail_engine(
                    self._shared,
                    ExecutionLostError(f"a step has run for more than {self._hang_limit} s"),
                )
                changed = True
        return changed

    def stop(self) -> None:
        """End the thread. Requests that still live keep no limits."""
        self._stopped = True
        self._bell.ring()

    def _expire(self, record: RequestRecord, name: str) -> bool:
        error = DeadlineExceededError(name, f"request {record.id}: its {name} time limit passed")
        if not terminate(record, Outcome(TerminalStatus.EXECUTION_ERROR, error=error)):
            return False
        self._shared.counters.add("expired")
        # Its seat is the actor's to free.
        self._shared.notice()
        return True

    def _start(self) -> None:
        with self._lock:
            if self._threaded and self._thread is None and not self._stopped:
                self._thread = threading.Thread(
                    target=self._run, name="steppe-deadlines", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while not self._stopped:
            self.poll()
            self._bell.wait(self._patience())

    def _patience(self) -> float | None:
        with self._lock:
            due = self._heap[0][0] if self._heap else None
        limit = self._hang_limit
        if due is None and limit is None:
            return None
        waits = [
            wait for wait in (self._nap, None if limit is None else limit / 4) if wait is not None
        ]
        if due is not None:
            waits.append(due - self._clock())
        return min(waits)


def _moot(record: RequestRecord, name: str) -> bool:
    """Whether that limit cannot be missed any more."""
    if not record.live or record.cancelled:
        return True
    if name == "queue":
        return record.admitted
    return name == "first_token" and record.first_token
