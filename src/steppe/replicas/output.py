"""The bounded output of one request: chunks from one writer to one reader, and its one end."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from steppe.errors import NetworkError, RequestCancelledError
from steppe.replicas.vocabulary import TokenChunk
from steppe.request import LLMGenerationResponse, SequenceOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from steppe.request import TokenLogprob

__all__ = ["OutputChannel", "joined", "whole_response"]

CAPACITY = 64
"""Chunks that wait unread before further ones are merged."""


class OutputChannel:
    """What a request has produced and nobody has taken yet. One event loop; one reader.

    The writer never waits. Of a reader who is more than ``capacity`` chunks behind, what comes
    then is merged into one chunk for each sequence, so a channel holds its own request's output at
    most. It ends once, with or without an error; what is written after that is ignored.

    Three hooks, for whoever is behind it. ``on_cancel``: the reader gave up before the end.
    ``on_failure``: a writer failed before its first chunk; True if another one takes over, and then
    this is no end. ``on_end``: it has ended, with that error or none.
    """

    __slots__ = (
        "_accepted",
        "_begun",
        "_capacity",
        "_chunks",
        "_done",
        "_error",
        "_late",
        "_never_accepted",
        "_waiter",
        "on_cancel",
        "on_end",
        "on_failure",
    )

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._chunks: deque[TokenChunk] = deque()
        self._late: list[TokenChunk] = []
        self._waiter: asyncio.Future[None] | None = None
        self._begun = False
        self._done = False
        self._error: Exception | None = None
        self._accepted: asyncio.Future[None] | bool = False
        self._never_accepted = False
        self.on_cancel: Callable[[], object] | None = None
        self.on_failure: Callable[[Exception], bool] | None = None
        self.on_end: Callable[[Exception | None], object] | None = None

    # ---- the writer ------------------------------------------------------------------------------

    def accept(self) -> None:
        """A runner has accepted the request: chunks may come."""
        if not self._done and self._accepted is not True:
            self._answer()

    def push(self, chunk: TokenChunk) -> None:
        """Append a chunk. Never waits."""
        if self._done:
            return
        self._begun = True
        if self._late or len(self._chunks) >= self._capacity:
            self._late.append(chunk)
        else:
            self._chunks.append(chunk)
        self._wake()

    def close(self, error: Exception | None = None) -> None:
        """The end: complete, or failed. The first end stands."""
        if self._done:
            return
        failed = self.on_failure
        if error is None or self._begun or failed is None or not failed(error):
            self._finish(error)

    # A cancel and an end come this way, and only the first of them.
    def _finish(self, error: Exception | None) -> None:
        self._done = True
        self._error = error
        on_end, self.on_end = self.on_end, None
        self.on_cancel = self.on_failure = None
        if on_end is not None:
            on_end(error)
        if self._accepted is not True:
            self._never_accepted = True
            self._answer()
        self._wake()

    def _answer(self) -> None:
        waiting, self._accepted = self._accepted, True
        if isinstance(waiting, asyncio.Future) and not waiting.done():
            waiting.set_result(None)

    # ---- the reader ------------------------------------------------------------------------------

    async def accepted(self) -> None:
        """Wait until a runner has accepted the request. Raises what ended it before that."""
        if self._accepted is False:
            self._accepted = asyncio.get_running_loop().create_future()
        if isinstance(self._accepted, asyncio.Future):
            await self._accepted
        if self._never_accepted and self._error is not None:
            raise self._error.with_traceback(None)

    async def pop(self) -> TokenChunk | None:
        """The next chunk, None at the end. Raises the error that ended it."""
        while not self._chunks:
            if self._done:
                if self._error is not None:
                    # Asked twice, it would pile up the frames of both.
                    raise self._error.with_traceback(None)
                return None
            if self._waiter is not None:
                raise RuntimeError("this channel already has a reader")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        chunk = self._chunks.popleft()
        if self._late and not self._chunks:
            self._chunks.extend(joined(self._late))
            self._late.clear()
        return chunk

    def cancel(self) -> None:
        """Give up: the reader is released at once, and whoever writes is told. Idempotent."""
        if self._done:
            return
        on_cancel = self.on_cancel
        self._chunks.clear()
        self._late.clear()
        self._finish(RequestCancelledError("the request was cancelled"))
        if on_cancel is not None:
            on_cancel()

    # ---- state -----------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether a chunk was ever written: from then on the request cannot move elsewhere."""
        return self._begun

    @property
    def was_accepted(self) -> bool:
        """Whether a runner ever accepted the request."""
        return self._accepted is True and not self._never_accepted

    @property
    def done(self) -> bool:
        """Whether it has ended. Chunks may still wait to be read."""
        return self._done

    @property
    def error(self) -> Exception | None:
        """What ended it, if it did not complete."""
        return self._error

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def joined(chunks: Sequence[TokenChunk]) -> list[TokenChunk]:
    """Successive chunks of a request as one for each sequence; the one that ends it stays last."""
    parts: dict[int, list[TokenChunk]] = {}
    for chunk in chunks:
        parts.setdefault(chunk.index, []).append(chunk)
    whole = [_one(index, part) for index, part in parts.items()]
    whole.sort(key=lambda chunk: chunk.usage is not None)
    return whole


def _one(index: int, chunks: Sequence[TokenChunk]) -> TokenChunk:
    if len(chunks) == 1:
        return chunks[0]
    end = chunks[-1]
    logprobs: list[TokenLogprob] | None = None
    for chunk in chunks:
        if chunk.logprobs is not None:
            logprobs = logprobs or []
            logprobs.extend(chunk.logprobs)
    return TokenChunk(
        index,
        "".join([chunk.text for chunk in chunks]),
        tuple([token for chunk in chunks for token in chunk.token_ids]),
        None if logprobs is None else tuple(logprobs),
        end.finished,
        end.finish_reason,
        end.stop_reason,
        end.usage,
        end.prompt_logprobs,
        end.embedding,
    )


def whole_response(chunks: Sequence[TokenChunk]) -> LLMGenerationResponse:
    """The response that all chunks of a request amount to.

    Raises NetworkError if a sequence among them has no end, or the request none.
    """
    whole = joined(chunks)
    last = whole[-1] if whole else TokenChunk()
    if last.usage is None:
        raise NetworkError("the answer ended before its end")
    return LLMGenerationResponse(
        tuple(_output(chunk, last) for chunk in sorted(whole, key=lambda chunk: chunk.index)),
        last.usage,
    )


def _output(chunk: TokenChunk, last: TokenChunk) -> SequenceOutput:
    if chunk.finish_reason is None:
        raise NetworkError(f"sequence {chunk.index} ended before its end")
    return SequenceOutput(
        chunk.index,
        chunk.text,
        chunk.token_ids,
        chunk.finish_reason,
        chunk.stop_reason,
        chunk.logprobs,
        last.prompt_logprobs,
        last.embedding,
    )
