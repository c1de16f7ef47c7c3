"""One request at a remote engine, as its reader sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol, Self

from steppe.errors import SteppeError
from steppe.replicas.remote.answers import StreamReader
from steppe.replicas.remote.attempts import earliest
from steppe.replicas.remote.http import events_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from steppe.replicas.remote.attempts import Answer, Attempts, TimeLimit
    from steppe.replicas.vocabulary import ExecuteBatch, TokenChunk

__all__ = ["Owner", "RemoteHandle", "SingleChunk"]

DONE = "[DONE]"


class Owner(Protocol):
    """Who counts the handles."""

    def ended(self, handle: RemoteHandle, outcome: str) -> None:
        """One has ended: ``completed``, ``cancelled`` or ``failed``. Once for each."""


class RemoteHandle:
    """A ``RunHandle`` over the events of an answer.

    Nothing is read ahead of the reader: what it has not taken waits in the connection, which is the
    request's own. A try that fails before anything came is made again where that may help.

    ``limits`` are times by which all must have come, ``first_limits`` those of the first chunk.
    """

    def __init__(
        self,
        owner: Owner,
        batch: ExecuteBatch,
        attempts: Attempts,
        answer: Answer,
        limits: Sequence[TimeLimit],
        first_limits: Sequence[TimeLimit],
    ) -> None:
        self.batch = batch
        self.began = asyncio.get_running_loop().time()
        self.tokens = 0
        self._owner = owner
        self._attempts = attempts
        self._limit = earliest(limits)
        self._first_limit = earliest([*limits, *first_limits])
        self._begun = False
        self._done = False
        self._ending: Exception | None = None
        self._timeout: asyncio.Timeout | None = None
        self._ready: deque[TokenChunk] = deque()
        self._open(answer)

    @property
    def prompt_tokens(self) -> int | None:
        """Of a prompt that was given as ids."""
        prompt = self.batch.request.prompt
        return None if prompt is None or isinstance(prompt, str) else len(prompt)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        if self._done:
            if self._ending is not None:
                ending, self._ending = self._ending, None
                raise ending
            raise StopAsyncIteration
        if self._ending is not None:
            ending, self._ending = self._ending, None
            await self._end("failed")
            raise ending
        limit = self._limit if self._begun else self._first_limit
        try:
            async with asyncio.timeout_at(None if limit is None else limit.at) as self._timeout:
                chunk = await self._next(limit)
        except TimeoutError:
            error = self._ending
            if error is None:
                assert limit is not None
                error = limit.error
            self._ending = None
            await self._end("failed")
            raise error from None
        except SteppeError as error:
            if error.blames_replica:
                self._answer.permit.failed()
            await self._end("failed")
            raise
        finally:
            self._timeout = None
        self._begun = True
        self.tokens += len(chunk.token_ids)
        if chunk.usage is not None:
            used = chunk.usage.prompt_tokens + chunk.usage.completion_tokens
            self._attempts.settle(used)
            self.tokens = chunk.usage.completion_tokens
            self._answer.permit.succeeded()
            await self._end("completed")
        return chunk

    async def aclose(self) -> None:
        """Hang up, which is how such a server is told to stop."""
        self._ending = None
        if not self._done:
            await self._end("cancelled")

    async def abort(self, error: Exception) -> None:
        """End it from outside: its reader gets ``error``, now or when it next asks."""
        if self._done or self._ending is not None:
            return
        self._ending = error
        if self._timeout is None:
            await self._end("failed")
        else:
            self._timeout.reschedule(0.0)

    def _open(self, answer: Answer) -> None:
        params = self.batch.request.params
        self._answer = answer
        self._reader = StreamReader(params.n, logprobs=params.logprobs is not None)
        self._events: AsyncGenerator[str, None] = events_of(answer.response)

    async def _next(self, limit: TimeLimit | None) -> TokenChunk:
        while not self._ready:
            try:
                data = await anext(self._events, DONE)
                if data == DONE:
                    return self._reader.end()
                self._ready.extend(self._reader.take(data))
            except SteppeError as error:
                if self._begun or not error.retryable:
                    raise
                self._answer.permit.failed()
                await self._close()
                self._open(await self._attempts.open(limit, error))
        return self._ready.popleft()

    async def _end(self, outcome: str) -> None:
        self._done = True
        self._ready.clear()
        self._answer.permit.dropped()
        self._owner.ended(self, outcome)
        await self._close()

    async def _close(self) -> None:
        await self._events.aclose()
        await self._answer.response.aclose()


class SingleChunk:
    """A ``RunHandle`` over an answer that was whole when it came."""

    def __init__(self, chunk: TokenChunk) -> None:
        self._chunk: TokenChunk | None = chunk

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        chunk, self._chunk = self._chunk, None
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        self._chunk = None
