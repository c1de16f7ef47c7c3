"""Token streams: the channel between the thread that generates and the one reader that consumes.

Seed 000/002 (``StreamChannel``, ``StreamChunk``). The writer never blocks and never waits for a
reader. What a slow reader has not taken is merged in place, so a channel holds at most the output
of its own request. ``deliver`` is the one function that writes channels.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from steppe.request import FinishReason, TokenLogprob, Usage
    from steppe.stepping.types import TokenDelta

__all__ = ["Finish", "StreamChannel", "StreamChunk", "Wakeups", "deliver"]


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """Part of one sequence's output. Chunks of one ``index`` concatenate to its text and token ids.

    The chunk with ``finished`` is the last of its sequence and carries ``finish_reason``. ``usage``
    is set on the chunk that ends the request.
    """

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended. ``closes_channel`` when no other sequence of the request is left."""

    reason: FinishReason
    stop_reason: str | int | None = None
    usage: Usage | None = None
    closes_channel: bool = True


class Wakeups:
    """Event loops to wake after a commit, each once, however many channels it reads.

    Producer thread only. ``flush`` must be called; a loop that closed meanwhile is skipped: nobody
    reads there.
    """

    def __init__(self) -> None:
        self._pending: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def add(self, waiter: asyncio.Future[None]) -> None:
        """Remember to release ``waiter`` on its own loop."""
        self._pending.setdefault(waiter.get_loop(), []).append(waiter)

    def flush(self) -> None:
        """Wake every loop once."""
        pending, self._pending = self._pending, {}
        for loop, waiters in pending.items():
            _wake(loop, waiters)


def _wake(loop: asyncio.AbstractEventLoop, waiters: list[asyncio.Future[None]]) -> None:
    try:
        loop.call_soon_threadsafe(_release, waiters)
    except RuntimeError:
        # The loop was closed between registration and now; its readers are gone with it.
        if not loop.is_closed():
            raise


def _release(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


class _Pending:
    """Output of one sequence that nobody has taken yet."""

    __slots__ = ("finish", "index", "logprobs", "text", "token_ids")

    def __init__(self, index: int) -> None:
        self.index = index
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish: Finish | None = None

    def chunk(self) -> StreamChunk:
        finish = self.finish
        return StreamChunk(
            index=self.index,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            finished=finish is not None,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            usage=finish.usage if finish else None,
        )


class StreamChannel:
    """A stream of chunks with one writer and one reader, sync or async. Single use.

    Any thread may cancel and ask for state. ``cancelled`` and ``finished`` are different things: a
    reader sets the first, the writer the second, after the last chunk is in place. Reading goes on
    until the chunks are drained.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readable = threading.Condition(self._lock)
        self._pending: deque[_Pending] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._sleepers = 0
        self._attached = False
        self._cancelled = False
        self._finish_reason: FinishReason | None = None
        self._on_cancel: Callable[[], object] | None = None

    # ---- the reader ------------------------------------------------------------------------------

    def try_pop(self) -> StreamChunk | None:
        """The next chunk, or None when there is none now. Merges all that has come since the last
        pop.
        """
        with self._lock:
            return self._pop_locked()

    def wait_pop(self, timeout: float | None = None) -> StreamChunk | None:
        """Block for the next chunk. None after ``timeout`` seconds, or when the stream is over and
        drained.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._readable:
            while not self._pending and not self._over_locked():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._sleepers += 1
                try:
                    self._readable.wait(left)
                finally:
                    self._sleepers -= 1
            return self._pop_locked()

    def consume(self, handler: Callable[[StreamChunk], object]) -> None:
        """Block until the stream is over, giving every chunk to ``handler``."""
        while (chunk := self.wait_pop()) is not None:
            handler(chunk)

    async def pop(self) -> StreamChunk | None:
        """The next chunk, awaited; None when the stream is over and drained. One reader only."""
        while True:
            with self._lock:
                if self._pending or self._over_locked():
                    return self._pop_locked()
                if self._waiter is not None and not self._waiter.done():
                    raise RuntimeError("this channel already has a reader")
                waiter = self._waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                with self._lock:
                    if self._waiter is waiter:
                        self._waiter = None

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        while (chunk := await self.pop()) is not None:
            yield chunk

    def cancel(self) -> None:
        """Any thread: ask the writer to stop, and release whoever waits. Idempotent, never blocks
        for long.
        """
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            on_cancel = self._on_cancel
            waiter = self._notify_locked()
        if waiter is not None:
            _wake(waiter.get_loop(), [waiter])
        if on_cancel is not None:
            on_cancel()

    # ---- state, any thread -----------------------------------------------------------------------

    @property
    def cancelled(self) -> bool:
        """Whether somebody cancelled. Says nothing about whether the writer has noticed."""
        return self._cancelled

    @property
    def finished(self) -> bool:
        """Whether the writer is done. Chunks may still wait to be read."""
        return self._finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """How the stream ended; None while it runs. The first writer of it wins."""
        return self._finish_reason

    @property
    def attached(self) -> bool:
        """Whether some request writes here already."""
        return self._attached

    # ---- the writer ------------------------------------------------------------------------------

    def attach(self, on_cancel: Callable[[], object] | None = None) -> None:
        """Claim this channel for one request. ``on_cancel`` runs on the cancelling thread, outside
        the lock.

        Raises ValueError if the channel was used before.
        """
        with self._lock:
            if self._attached or self.finished:
                raise ValueError("a stream channel serves one request, this one was used before")
            self._attached = True
            self._on_cancel = on_cancel
            cancelled = self._cancelled
        if cancelled and on_cancel is not None:
            on_cancel()

    def detach(self) -> None:
        """Give up a claim under which nothing was written, so that another request can have it."""
        with self._lock:
            self._attached = False
            self._on_cancel = None

    def push(
        self,
        index: int,
        delta: TokenDelta | None,
        finish: Finish | None = None,
        wakeups: Wakeups | None = None,
    ) -> None:
        """Writer only: append what sequence ``index`` gained, and how it ended if it did. See
        ``deliver``.
        """
        with self._lock:
            if self._finish_reason is not None:
                return
            # The usual cases first: everything was read, or one sequence has more to say.
            pending = self._pending
            if pending and (last := pending[-1]).index == index and last.finish is None:
                entry = last
            else:
                entry = self._entry_locked(index)
            if delta is not None:
                entry.token_ids.extend(delta.token_ids)
                if delta.text:
                    entry.text.append(delta.text)
                if delta.logprobs is not None:
                    entry.logprobs = (entry.logprobs or []) + list(delta.logprobs)
            if finish is not None:
                entry.finish = finish
                if finish.closes_channel:
                    self._close_locked(finish.reason)
            if self._sleepers:
                self._readable.notify_all()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._release(waiter, wakeups)

    def finish(self, reason: FinishReason, wakeups: Wakeups | None = None) -> None:
        """Writer only: end the stream without another chunk. The first finish wins."""
        with self._lock:
            if self._finish_reason is not None:
                return
            self._close_locked(reason)
            waiter = self._notify_locked()
        if waiter is not None:
            self._release(waiter, wakeups)

    # ---- inside ----------------------------------------------------------------------------------

    def _entry_locked(self, index: int) -> _Pending:
        for entry in self._pending:
            if entry.index == index and entry.finish is None:
                return entry
        entry = _Pending(index)
        self._pending.append(entry)
        return entry

    def _pop_locked(self) -> StreamChunk | None:
        return self._pending.popleft().chunk() if self._pending else None

    def _close_locked(self, reason: FinishReason) -> None:
        self._finish_reason = reason
        # It refers to the request, which refers to this channel: let both go without the collector.
        self._on_cancel = None

    def _over_locked(self) -> bool:
        return self._cancelled or self._finish_reason is not None

    def _notify_locked(self) -> asyncio.Future[None] | None:
        if self._sleepers:
            self._readable.notify_all()
        waiter, self._waiter = self._waiter, None
        return waiter

    @staticmethod
    def _release(waiter: asyncio.Future[None], wakeups: Wakeups | None) -> None:
        if wakeups is None:
            _wake(waiter.get_loop(), [waiter])
        else:
            wakeups.add(waiter)


def deliver(
    channel: StreamChannel | None,
    delta: TokenDelta | None,
    finish: Finish | None = None,
    index: int = 0,
    wakeups: Wakeups | None = None,
) -> None:
    """Write one step's output of one sequence to its channel; the only writer of channels there is.

    Nothing is written for an empty delta without a finish. The terminal chunk goes in before
    ``finished`` is seen.
    """
    if channel is None:
        return
    if finish is None and (delta is None or not (delta.token_ids or delta.text)):
        return
    channel.push(index, delta, finish, wakeups)
