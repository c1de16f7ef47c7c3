"""Streams that outlive their connection, for clients that ask for it.

A task of its own reads such a stream into a bounded log of numbered events, and whoever is
connected is written from there. What no client was sent stays in the log whatever happens: when it
is full the task waits, and the engine merges what comes meanwhile. Only what was sent before is
forgotten to make room. Event loop only.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from typing import TYPE_CHECKING

from steppe.server.errors import Problem, ProblemError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from starlette.datastructures import Headers

    from steppe.server.settings import ServerSettings

__all__ = ["ASKED", "TOKEN", "ResumableStream", "ResumableStreams", "StreamReader"]

ASKED = "x-steppe-resume"
"""The header that asks for it, in seconds; in an answer, what was granted."""
TOKEN = "x-steppe-stream"
"""The header that names the stream."""
END = b"\n\n"


class ResumableStream:
    """One stream, and what of it may be asked for again.

    It lives while a client reads it, and ``patience`` seconds after the last one left; then
    ``forget`` is called, and what still runs is cancelled. ``limit`` bounds, in bytes, both what
    was sent and is kept, and what waits to be sent.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        owner: str,
        patience: float,
        limit: int,
        forget: Callable[[ResumableStream], None],
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self.owner = owner
        self.patience = patience
        self._limit = limit
        self._forget = forget
        self._log: deque[bytes] = deque()
        self._last = 0  # the number of the newest event in the log
        self._sent = 0  # the number of the newest one that a client was sent
        self._kept_bytes = 0
        self._waiting_bytes = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._reader: StreamReader | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None
        self._source = asyncio.create_task(self._fill(events))
        self._source.add_done_callback(self._ended)

    @property
    def spent(self) -> bool:
        """Whether nothing is left to send, and nobody is there."""
        return self._source.done() and self._sent == self._last and self._reader is None

    def open(self, after: int) -> StreamReader:
        """The events behind number ``after``. Raises ProblemError: somebody reads already (409), or
        those events are not here (400, 410).
        """
        if self._reader is not None:
            raise ProblemError(
                Problem(409, "this stream is being read already", code="stream_in_use")
            )
        if after > self._last:
            raise ProblemError(
                Problem(400, f"there is no event {after} yet", param="last-event-id")
            )
        if after < self._last - len(self._log):
            raise ProblemError(
                Problem(410, f"what follows event {after} is not kept any more", code="events_gone")
            )
        if self._timer is not None:
            self._timer.cancel()
        self._reader = StreamReader(self, after)
        return self._reader

    def drop(self) -> None:
        """End it: what still runs is cancelled, and nobody can come back to it."""
        if self._timer is not None:
            self._timer.cancel()
        self._source.cancel()
        self._forget(self)

    # ---- for its reader --------------------------------------------------------------------------

    async def event(self, number: int) -> bytes | None:
        """That event, when there is one; None at the end. Raises what ended the source early."""
        while number > self._last:
            if self._source.done():
                if self._error is not None:
                    raise self._error
                return None
            self._news.clear()
            await self._news.wait()
            if self._reader is None or self._reader.left:
                return None
        return self._log[number - 1 - (self._last - len(self._log))]

    def sent(self, number: int) -> None:
        """A client was sent events up to that number."""
        while self._sent < number:
            size = len(self._log[self._sent - (self._last - len(self._log))])
            self._sent += 1
            self._waiting_bytes -= size
            self._kept_bytes += size
        while self._kept_bytes > self._limit:
            self._kept_bytes -= len(self._log.popleft())
        self._room.set()

    def wake(self) -> None:
        """Let a reader that waits look again."""
        self._news.set()

    def close(self, reader: StreamReader) -> None:
        """``reader`` has left."""
        if self._reader is reader:
            self._reader = None
            self._timer = asyncio.get_running_loop().call_later(self.patience, self.drop)

    # ---- the source ------------------------------------------------------------------------------

    async def _fill(self, events: AsyncGenerator[bytes]) -> None:
        try:
            async for data in events:
                while self._waiting_bytes >= self._limit:
                    self._room.clear()
                    await self._room.wait()
                # One write may hold several events, and a client may get only the first of them.
                for one in data.removesuffix(END).split(END):
                    self._last += 1
                    self._log.append(b"id: %d\n%b%b" % (self._last, one, END))
                    self._waiting_bytes += len(self._log[-1])
                self._news.set()
        finally:
            await events.aclose()

    def _ended(self, source: asyncio.Task[None]) -> None:
        if not source.cancelled():
            self._error = source.exception()
        self._news.set()


class StreamReader:
    """One client's turn at a stream: an iterator of events that ends when the client has left."""

    def __init__(self, stream: ResumableStream, after: int) -> None:
        self._stream = stream
        self._number = after
        self.left = False

    def leave(self) -> None:
        """The client has left."""
        self.left = True
        self._stream.wake()

    def __aiter__(self) -> StreamReader:
        return self

    async def __anext__(self) -> bytes:
        if not self.left:
            # It was written when it is asked for the next, unless the client left meanwhile.
            self._stream.sent(self._number)
            event = await self._stream.event(self._number + 1)
            if event is not None and not self.left:
                self._number += 1
                return event
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Give the stream back."""
        self._stream.close(self)


class ResumableStreams:
    """Every stream that can be resumed, at most ``places`` of them."""

    def __init__(self, settings: ServerSettings, places: int) -> None:
        self._settings = settings
        self._places = places
        self._streams: dict[str, ResumableStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def granted(self, headers: Headers) -> float | None:
        """How long a request's stream may outlive its connection, in seconds; None if it does not
        ask. Raises ProblemError (400).
        """
        asked = headers.get(ASKED)
        if asked is None:
            return None
        try:
            seconds = float(asked)
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds > 0):
            raise _refusal("must be a number of seconds above 0", "invalid_value")
        if not self._settings.max_resume:
            raise _refusal("this server was started with --max-resume 0", "unsupported_value")
        return min(seconds, self._settings.max_resume)

    def check(self, headers: Headers, *, resumable: bool) -> None:
        """Raise ProblemError if a request asks for what it cannot get: 400 if it asks badly or has
        no stream of events (``resumable`` false), 429 if too many streams are kept.
        """
        if self.granted(headers) is None:
            return
        if not resumable:
            raise _refusal("only a stream of events can be resumed", "unsupported_value")
        if len(self._streams) >= self._places:
            # Whoever has been sent everything is the least likely to come back.
            spent = next((one for one in self._streams.values() if one.spent), None)
            if spent is None:
                raise ProblemError(
                    Problem(
                        429, f"{self._places} streams are kept already", "rate_limit_error",
                        code="resume_full", retry_after=1.0,
                    )
                )  # fmt: skip
            spent.drop()

    def add(self, events: AsyncGenerator[bytes], *, owner: str, patience: float) -> ResumableStream:
        """Keep a stream, which is read from now on."""
        stream = ResumableStream(
            events,
            owner=owner,
            patience=patience,
            limit=self._settings.resume_buffer,
            forget=self._drop,
        )
        self._streams[stream.token] = stream
        return stream

    def _drop(self, stream: ResumableStream) -> None:
        self._streams.pop(stream.token, None)

    def find(self, token: str, owner: str) -> ResumableStream:
        """A stream of that caller. Raises ProblemError (404)."""
        stream = self._streams.get(token)
        if stream is None or stream.owner != owner:
            raise ProblemError(
                Problem(404, "there is no such stream, or not any more", code="stream_not_found")
            )
        return stream


def _refusal(message: str, code: str) -> ProblemError:
    return ProblemError(Problem(400, f"{ASKED}: {message}", param=ASKED, code=code))
