"""A caller's claim on one request that some replica runs."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from steppe.replicas.output import whole_response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from steppe.replicas.output import OutputChannel
    from steppe.replicas.vocabulary import TokenChunk
    from steppe.request import LLMGenerationResponse

__all__ = ["ReplicaHandle"]


class ReplicaHandle:
    """A ``ClientHandle`` over an output. Made and read on the event loop; cancelled anywhere.

    Dropped before its end, it cancels: nobody could read the rest.
    """

    __slots__ = ("__weakref__", "_chunks", "_loop", "_output", "_response", "_thread", "id")

    def __init__(self, request_id: int, output: OutputChannel) -> None:
        self.id = request_id
        self._output = output
        self._chunks: list[TokenChunk] = []
        self._response: LLMGenerationResponse | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    @property
    def ready(self) -> bool:
        """Whether the request has an outcome."""
        return self._output.done

    def cancel(self) -> None:
        """Ask for an end. Never blocks; without effect on a request that has ended."""
        output = self._output
        if output.done:
            return
        if threading.get_ident() == self._thread:
            output.cancel()
            return
        try:
            self._loop.call_soon_threadsafe(output.cancel)
        except RuntimeError:
            # The loop is closed, and with it went whatever ran.
            if not self._loop.is_closed():
                raise

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        try:
            while (chunk := await self._next()) is not None:
                yield chunk
        finally:
            self.cancel()

    async def result(self) -> LLMGenerationResponse:
        """The whole response, also after its chunks were read. Raises what ended it."""
        try:
            while await self._next() is not None:
                pass
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._response is None:
            self._response = whole_response(self._chunks)
        return self._response

    async def _next(self) -> TokenChunk | None:
        chunk = await self._output.pop()
        if chunk is not None:
            self._chunks.append(chunk)
        return chunk

    def __del__(self) -> None:
        # Whatever its constructor did not get to is not there.
        if getattr(self, "_thread", None) is not None:
            self.cancel()
