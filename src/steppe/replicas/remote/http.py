"""The wire to one server: requests out, heads and bounded bodies in, failures as our own errors."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2

from steppe.errors import NetworkError, UpstreamTimeoutError
from steppe.replicas.remote.answers import error_of, retry_after_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from steppe.replicas.remote.config import RemoteConfig

__all__ = ["Wire", "body_of", "events_of"]

T = TypeVar("T")

MAX_BODY = 2**24
"""Longest answer that is no stream, in bytes."""
MAX_EVENT = 2**22
"""Longest event of a stream, in bytes."""


class Wire:
    """A pool of connections to one server. One event loop."""

    def __init__(self, config: RemoteConfig, transport: httpx2.AsyncBaseTransport | None) -> None:
        self._base = config.base
        self._first_byte = config.first_byte_timeout
        key = {} if config.api_key is None else {"authorization": f"Bearer {config.api_key}"}
        self._client = httpx2.AsyncClient(
            headers=key,
            timeout=httpx2.Timeout(None, connect=config.connect_timeout, read=config.chunk_timeout),
            # How many run at once is bounded by the places that requests hold.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32),
            transport=transport,
            trust_env=False,
        )

    async def get(self, path: str) -> Any:
        """The JSON at a path below ``/v1``, or at ``/health``; None if there is none in it.

        Raises ReplicaError, InvalidRequestError.
        """
        base = self._base.removesuffix("/v1") if path == "/health" else self._base
        response = await self._send(self._client.build_request("GET", base + path))
        return parsed(await body_of(response))

    async def post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        """Send a body; returns when the head of a good answer is there, its own body unread.

        Raises ReplicaError, InvalidRequestError.
        """
        return await self._send(self._client.build_request("POST", self._base + path, json=body))

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        await self._client.aclose()

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        try:
            async with asyncio.timeout(self._first_byte):
                response = await self._client.send(request, stream=True)
        except httpx2.ConnectTimeout as error:
            raise UpstreamTimeoutError("connect", "no connection in time") from error
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise UpstreamTimeoutError("first_byte", "no answer in time") from error
        except httpx2.TransportError as error:
            raise NetworkError(f"no connection: {error}") from error
        if response.status_code == 200:
            return response
        body = await body_of(response)
        raise error_of(
            response.status_code,
            parsed(body) or body[:1000].decode("utf-8", "replace"),
            retry_after=retry_after_of(response.headers),
        )


async def body_of(response: httpx2.Response) -> bytes:
    """All of a body, then the response is closed. Raises NetworkError, UpstreamTimeoutError."""
    whole = bytearray()
    try:
        async for part in _guarded(response.aiter_bytes()):
            whole += part
            if len(whole) > MAX_BODY:
                raise NetworkError(f"the answer is longer than {MAX_BODY} bytes")
    finally:
        await response.aclose()
    return bytes(whole)


async def events_of(response: httpx2.Response) -> AsyncGenerator[str, None]:
    """The data of each event of a stream. Raises NetworkError, UpstreamTimeoutError."""
    async for event in _guarded(aiter(httpx2.EventSource(response, MAX_EVENT))):
        yield event.data


async def _guarded(parts: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The same, with failures of the connection as our own errors."""
    try:
        async for part in parts:
            yield part
    except httpx2.TimeoutException as error:
        raise UpstreamTimeoutError("between_chunks", "it went silent in its answer") from error
    except (httpx2.TransportError, httpx2.SSEError, httpx2.DecodingError) as error:
        raise NetworkError(f"the answer broke off: {error}") from error


def parsed(body: bytes) -> Any:
    """JSON; None for what is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
