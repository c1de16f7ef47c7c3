"""A caller's claim on one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator

    from steppe.engine.record import Outcome, RequestRecord
    from steppe.request import LLMGenerationResponse
    from steppe.stepping.types import RequestId
    from steppe.streaming import StreamChannel, StreamChunk

__all__ = ["RequestHandle"]


class RequestHandle:
    """One in-flight request, as its caller holds it (seed 000). Any thread; one consumer.

    It can be moved, not copied: a channel has one reader. It may outlive its engine, and does not
    keep it alive. ``await handle`` is ``get()``; ``async for chunk in handle`` reads the stream,
    cancels the request when the loop is left early, and raises what ``get()`` would at its end.
    """

    __slots__ = ("__weakref__", "_record")

    def __init__(self, record: RequestRecord | None = None) -> None:
        self._record = record

    @property
    def id(self) -> RequestId:
        """The request's id; 0 once moved from."""
        return 0 if self._record is None else self._record.id

    @property
    def valid(self) -> bool:
        """Whether this handle still stands for a request."""
        return self._record is not None

    @property
    def stream(self) -> StreamChannel:
        """The channel its chunks appear in. Raises RuntimeError once moved from."""
        return self._held().channel

    def stream_shared(self) -> StreamChannel:
        """The same channel: in Python every reference shares ownership."""
        return self.stream

    @property
    def ready(self) -> bool:
        """Whether the request has an outcome. The end of its stream is another matter."""
        return self._record is not None and self._record.ready

    def get(self, timeout: float | None = None) -> LLMGenerationResponse:
        """Block until the request has ended; its response, the same one every time.

        Raises RequestCancelledError, at once after a cancel; RequestFailedError (or its
        DeadlineExceededError) if it died; TimeoutError after ``timeout`` seconds; RuntimeError once
        moved from.
        """
        return _response(self._held().wait(timeout))

    def cancel(self) -> None:
        """Ask for an end. Never blocks; idempotent; without effect on a request that has ended.

        Callers that wait are released now. A request that runs ends at the next step boundary.
        """
        if self._record is not None:
            self._record.cancel()

    def move(self) -> RequestHandle:
        """A new handle for the request; this one becomes invalid."""
        record, self._record = self._record, None
        return RequestHandle(record)

    def __await__(self) -> Generator[object, None, LLMGenerationResponse]:
        return self._get_async().__await__()

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        record = self._held()
        try:
            while (chunk := await record.channel.pop()) is not None:
                yield chunk
        finally:
            # Left early, by break, by an exception or by cancellation of the task.
            if not record.channel.finished:
                record.cancel()
        _response(await record.wait_async())

    def __copy__(self) -> NoReturn:
        raise TypeError("a RequestHandle cannot be copied, it can be moved")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RequestHandle cannot be pickled")

    def __repr__(self) -> str:
        if self._record is None:
            return "<RequestHandle, moved from>"
        state = "ready" if self._record.ready else "in flight"
        return f"<RequestHandle of request {self._record.id}, {state}>"

    async def _get_async(self) -> LLMGenerationResponse:
        return _response(await self._held().wait_async())

    def _held(self) -> RequestRecord:
        if self._record is None:
            raise RuntimeError("this handle was moved from")
        return self._record


def _response(outcome: Outcome) -> LLMGenerationResponse:
    if outcome.error is not None:
        # A handle may be asked twice: do not pile up the frames of both.
        raise outcome.error.with_traceback(None)
    assert outcome.response is not None
    return outcome.response
