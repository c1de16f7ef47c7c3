"""Messages between a server and the processes of its replicas: JSON in frames of bounded size."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import TYPE_CHECKING, Any

from steppe.errors import NetworkError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_FRAME", "FrameProtocol", "frame"]

MAX_FRAME = 64 * 2**20
"""Bytes of one message: the prompt logprobs of a long context fit, an endless one does not."""
HEADER = struct.Struct(">I")

_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def frame(message: list[Any]) -> bytes:
    """A message as it is sent: its length in four bytes, then JSON. Raises NetworkError (size)."""
    body = _ENCODER.encode(message).encode("ascii")
    if len(body) > MAX_FRAME:
        raise NetworkError(f"a message of {len(body)} bytes, at most {MAX_FRAME} are allowed")
    return HEADER.pack(len(body)) + body


class FrameProtocol(asyncio.Protocol):
    """One end of a connection. ``on_message`` gets every message, a list that begins with its kind;
    ``on_end`` the reason when the connection is over, once.

    Frames that are sent in one turn of the loop leave in one write. A peer that sends what cannot
    be read is cut off.
    """

    def __init__(
        self, on_message: Callable[[list[Any]], object], on_end: Callable[[str], object]
    ) -> None:
        self._on_message = on_message
        self._on_end: Callable[[str], object] | None = on_end
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._outgoing: list[bytes] = []
        self._writable = asyncio.Event()
        self._writable.set()

    def send(self, message: list[Any]) -> None:
        """Send a message. Nothing happens once the connection is over. Raises NetworkError."""
        data = frame(message)
        if self._transport is None:
            return
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(data)

    async def drained(self) -> None:
        """Wait until the peer has taken enough of what was sent."""
        if not self._writable.is_set():
            await self._writable.wait()

    def abort(self, reason: str) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()
        self._over(reason)

    def _flush(self) -> None:
        data = b"".join(self._outgoing)
        self._outgoing.clear()
        if self._transport is not None and data:
            self._transport.write(data)

    # ---- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= HEADER.size and self._on_end is not None:
            (length,) = HEADER.unpack_from(buffer, start)
            if length > MAX_FRAME:
                self.abort(f"it announced a message of {length} bytes")
                return
            end = start + HEADER.size + length
            if len(buffer) < end:
                break
            body = bytes(buffer[start + HEADER.size : end])
            start = end
            try:
                message = json.loads(body)
                if not isinstance(message, list) or not message:
                    raise TypeError("a message is a list that begins with its kind")
                self._on_message(message)
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                # Nothing of a peer that talks nonsense can be relied on.
                self.abort(f"it sent what cannot be read: {error}")
                return
        del buffer[:start]

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._over("the connection ended" if error is None else f"the connection broke: {error}")

    def _over(self, reason: str) -> None:
        self._transport = None
        self._writable.set()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(reason)
