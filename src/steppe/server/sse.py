"""Server-sent events: how a stream is written, and what ends it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response

from steppe.server.disconnect import connection_of
from steppe.server.errors import dump

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from starlette.types import Receive, Scope, Send

    from steppe.server.settings import ServerSettings

__all__ = ["DONE", "PING", "EventStream", "Events", "event"]

DONE = b"data: [DONE]\n\n"
PING = b": still here\n\n"


def event(data: object, name: str | None = None) -> bytes:
    """One event. JSON has no raw line breaks, so it is a single ``data`` line."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + dump(data) + b"\n\n"


class Events(Protocol):
    """What a stream is made of. ``aclose`` is called on every way out."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None: ...


class EventStream(Response):
    """A response of events, written as they come, until ``events`` ends.

    They are closed on every way out: when the client leaves, it is the ``finally`` of a generator
    that cancels what it was reading. While there is nothing to write, a comment keeps
    proxies from hanging up, and shows whether anybody still reads.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Events,
        settings: ServerSettings,
        *,
        media_type: str | None = None,
        ping: bytes = PING,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        always = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(media_type=media_type, headers={**always, **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._ping_interval = settings.ping_interval
        self._ping = ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        written = loop.time()
        writing = asyncio.Lock()
        connection = connection_of(scope)

        async def write(data: bytes, *, more: bool = True) -> None:
            nonlocal written
            async with writing:
                await send({"type": "http.response.body", "body": data, "more_body": more})
            written = loop.time()

        async def keep_alive() -> None:
            while not connection.gone:
                quiet = loop.time() - written
                if quiet >= self._ping_interval:
                    await write(self._ping)
                else:
                    await asyncio.sleep(self._ping_interval - quiet)

        pinger: asyncio.Task[None] | None = None
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            if self._ping:
                pinger = asyncio.create_task(keep_alive())
            async for data in self._events:
                await write(data)
            if pinger is not None:
                pinger.cancel()
            await write(b"", more=False)
        finally:
            if pinger is not None:
                pinger.cancel()
            await self._events.aclose()
