"""Noticing at once that a client has gone, whatever its request is doing.

Frameworks do this for some responses under some versions of ASGI: a plain handler is never told,
a stream may learn of it only when a later write fails. So one task per request listens on the
receiving side from the moment the body has arrived until the response is complete, on every
endpoint alike.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from starlette.requests import Request

from steppe.server.errors import Problem, ProblemError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from steppe.server.settings import ServerSettings

__all__ = ["Connection", "ConnectionMiddleware", "connection_of"]

_KEY = "steppe.connection"


class Connection:
    """Whether the client of one request is still there. Event loop only."""

    __slots__ = ("_callbacks", "_gone")

    def __init__(self) -> None:
        self._gone = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self._gone.is_set()

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the client leaves; at once if it has left already."""
        if self.gone:
            callback()
        else:
            self._callbacks.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Do not call ``callback`` after all."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def leave(self) -> None:
        """The client has left."""
        if self.gone:
            return
        self._gone.set()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    async def wait_gone(self) -> None:
        """Wait until the client leaves."""
        await self._gone.wait()


def connection_of(scope: Scope) -> Connection:
    """The connection that a request, known by its scope, came over."""
    return cast("Connection", scope[_KEY])


class ConnectionMiddleware:
    """Takes the body in, within its limits, and then listens for the client's leaving.

    A client that takes nothing of the response for ``write_timeout`` counts as gone.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await self._body(Request(scope), receive)
        if body is None:
            return  # the client left before it had asked for anything
        patience = self._settings.write_timeout
        connection = Connection()
        scope[_KEY] = connection
        delivered = False

        async def receive_body() -> Message:
            nonlocal delivered
            if delivered:
                await connection.wait_gone()
                return {"type": "http.disconnect"}
            delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send_to_client(message: Message) -> None:
            if connection.gone:
                return
            try:
                async with asyncio.timeout(patience):
                    await send(message)
            except TimeoutError:
                # It takes nothing, so nothing can be told to it. Without an end of the response
                # the server closes the connection.
                connection.leave()
            except OSError:
                # How a server of ASGI 2.4 says that the client is gone.
                connection.leave()

        watcher = asyncio.create_task(_watch(receive, connection))
        try:
            await self._app(scope, receive_body, send_to_client)
        finally:
            watcher.cancel()

    async def _body(self, request: Request, receive: Receive) -> bytes | None:
        limit = self._settings.max_body_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise ProblemError(_too_large(limit))
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise ProblemError(_too_large(limit))
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ProblemError(
                Problem(408, "the body did not arrive in time", code="body_timeout")
            ) from None


async def _watch(receive: Receive, connection: Connection) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    connection.leave()


def _too_large(limit: int) -> Problem:
    return Problem(413, f"the body is larger than {limit} bytes", code="body_too_large")
