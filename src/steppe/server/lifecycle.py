"""The server as a process: a socket, uvicorn on it, and an orderly end.

An end has an order: not ready, no new requests, those under way are finished or, after a limit,
cancelled, every stream gets its last event, and only then do the connections close.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from steppe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

    from starlette.types import ASGIApp

    from steppe.client import EngineClient

__all__ = ["DrainingServer", "bind", "listen", "server_for"]

logger = logging.getLogger("steppe.server")

GRACE = 5
"""Seconds that connections get to take their last bytes once the engine is empty."""
BACKLOG = 1024


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address, not listening yet. Raises ConfigError when it is taken.

    Done before the model is loaded: a mistake shows at once, and nobody connects to a server that
    cannot answer.
    """
    try:
        infos = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError("host", f"{host!r} is no address: {error.strerror}") from error
    family, kind, protocol, _, address = infos[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError("port", f"cannot use {host}:{port}: {error.strerror}") from error
    return sock


def listen(sock: socket.socket) -> tuple[str, int]:
    """Let clients connect from now on; the address they reach. Raises ConfigError when another
    that was bound to the same address listens already.
    """
    host, port = sock.getsockname()[:2]
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError("port", f"cannot use {host}:{port}: {error.strerror}") from error
    return host, port


def server_for(
    app: ASGIApp, client: EngineClient, *, drain_timeout: float, log_level: str = "warning"
) -> DrainingServer:
    """A server for ``app``, which ends by draining ``client``."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        access_log=False,
        log_level=log_level,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE,
    )
    return DrainingServer(config, client, drain_timeout)


class DrainingServer(uvicorn.Server):
    """uvicorn, with an engine to drain before the connections are closed.

    The first SIGTERM or SIGINT starts the end; a second one cancels what still runs. The process
    ends with status 0 either way: it was asked to.
    """

    def __init__(self, config: uvicorn.Config, client: EngineClient, drain_timeout: float) -> None:
        super().__init__(config)
        self._client = client
        self._drain_timeout = drain_timeout
        self._hurry = False
        self._draining: asyncio.AbstractEventLoop | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain while the socket still listens, so that ``/ready`` can say no; then close."""
        self._draining = asyncio.get_running_loop()
        patience = 0.0 if self._hurry else self._drain_timeout
        logger.info("draining for at most %g s", patience)
        await self._client.drain(patience)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        if self.should_exit:
            self._hurry = True
            if self._draining is not None:
                # Not from here: a signal may come while this very thread holds a request's lock.
                self._draining.call_soon_threadsafe(self._client.cancel_all)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Take over the two signals while serving. Unlike uvicorn's own, does not raise them again
        afterwards: an end that was asked for is no failure.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {sig: signal.signal(sig, self.handle_exit) for sig in signals}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)
