"""The common way from a checked request to chunks and to a whole answer, for every API."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from steppe.errors import ContextLengthError, RequestCancelledError, UnsupportedRequestError
from steppe.request import LLMGenerationRequest, Usage
from steppe.server.disconnect import connection_of
from steppe.server.errors import Problem, ProblemError, problem_of
from steppe.server.limits import caller_of
from steppe.server.metrics import ServerMetrics
from steppe.server.resume import ResumableStreams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from fastapi import FastAPI, Request

    from steppe.client import ClientHandle, EngineClient
    from steppe.request import LLMGenerationResponse, SamplingParams
    from steppe.server.disconnect import Connection
    from steppe.server.settings import ServerSettings
    from steppe.streaming import StreamChunk

__all__ = ["Run", "Serving", "model_named", "problem_for", "serving_of", "start"]


@dataclass(slots=True)
class Serving:
    """What every route works with. One per application, event loop only."""

    client: EngineClient
    settings: ServerSettings
    started: int = field(default_factory=lambda: int(time.time()))
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    streams: ResumableStreams = field(init=False)

    def __post_init__(self) -> None:
        # As many may be under way as there are requests, and as many may have ended.
        self.streams = ResumableStreams(self.settings, 2 * self.client.card.max_pending)

    @property
    def names(self) -> tuple[str, ...]:
        """The model names that requests may use; the first is the one that answers carry."""
        return self.settings.served_names or (self.client.card.name,)


def serving_of(request: Request) -> Serving:
    """The ``Serving`` of the application that got this request."""
    app: FastAPI = request.app
    return cast("Serving", app.state.serving)


def model_named(serving: Serving, name: str | None) -> str:
    """The name to answer with. Raises ProblemError (404) for a model that is not served."""
    names = serving.names
    if name is None:
        return names[0]
    if name not in names:
        raise ProblemError(
            Problem(
                404,
                f"the model {name[:200]!r} does not exist; this server has {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        )
    return name


def problem_for(serving: Serving, error: Exception) -> Problem:
    """What the client is told about ``error``, at this moment of the server's life."""
    client = serving.client
    return problem_of(error, retry_after=client.retry_after(), stopping=not client.accepting)


@dataclass(slots=True)
class Run:
    """The accepted requests of one call: one for each prompt, in order.

    Sequence ``j`` of prompt ``i`` is choice ``i * n + j``. Whichever way it ends, nothing of it is
    left running.
    """

    serving: Serving
    connection: Connection
    handles: Sequence[ClientHandle]
    n: int
    began: float

    def cancel(self) -> None:
        """Ask for an end of everything that still runs."""
        for handle in self.handles:
            handle.cancel()

    def outlive(self) -> None:
        """Go on when the client leaves: somebody else sees to the end."""
        for handle in self.handles:
            self.connection.forget(handle.cancel)

    async def responses(self) -> list[LLMGenerationResponse]:
        """Every whole answer, in order. Raises what the first failure raised."""
        try:
            # Together, so that a failure ends the others at once.
            answers = await asyncio.gather(*(handle.result() for handle in self.handles))
        finally:
            self.cancel()
        self.serving.metrics.finished(time.perf_counter() - self.began)
        return answers

    async def chunks(self) -> AsyncGenerator[tuple[int, StreamChunk]]:
        """(choice, chunk) as they come. Raises what the first failure raised."""
        metrics = self.serving.metrics
        last: float | None = None
        source = self._one(0) if len(self.handles) == 1 else self._several()
        try:
            async for choice, chunk in source:
                if chunk.token_ids:
                    now = time.perf_counter()
                    if last is None:
                        metrics.first_token(now - self.began)
                    elif len(self.handles) == 1 and self.n == 1:
                        metrics.next_token((now - last) / len(chunk.token_ids))
                    last = now
                yield choice, chunk
            metrics.finished(time.perf_counter() - self.began)
        finally:
            self.cancel()
            await source.aclose()

    async def _one(self, prompt: int) -> AsyncGenerator[tuple[int, StreamChunk]]:
        async for chunk in self.handles[prompt]:
            yield prompt * self.n + chunk.index, chunk

    async def _several(self) -> AsyncGenerator[tuple[int, StreamChunk]]:
        # As many chunks wait here as there are prompts; the rest are merged in their channels.
        ready: asyncio.Queue[tuple[int, StreamChunk] | None] = asyncio.Queue(len(self.handles))

        async def pump(prompt: int) -> None:
            async for item in self._one(prompt):
                await ready.put(item)

        async def pump_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for prompt in range(len(self.handles)):
                        group.create_task(pump(prompt))
            finally:
                await ready.put(None)

        pumps = asyncio.create_task(pump_all())
        try:
            while (item := await ready.get()) is not None:
                yield item
            await pumps
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            pumps.cancel()
            await asyncio.gather(pumps, return_exceptions=True)


async def start(
    serving: Serving,
    request: Request,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    *,
    task: Literal["generate", "embed"] = "generate",
    priority: int | None = None,
    resumable: bool = False,
    cache_salt: str | None = None,
) -> Run:
    """Hand every prompt to the engine, before any of the response is sent.

    All are accepted or none: a refusal cancels those that were accepted before it. From here on
    the client's leaving cancels them. ``priority``: lower is sooner, as HTTP clients know it.
    ``resumable``: the answer is a stream that may be read on after that. Raises
    InvalidRequestError and its kin, SubmitError.
    """
    client, settings = serving.client, serving.settings
    connection = connection_of(request.scope)
    serving.streams.check(request.headers, resumable=resumable)
    if priority and client.card.scheduling != "fair":
        raise UnsupportedRequestError("priority", "needs a server with --scheduling fair")
    began = time.perf_counter()
    client.check_room(len(prompts) * params.n)
    # Nothing is handed over before every prompt has been read and found to be one.
    requests = []
    for prompt in prompts:
        ids = await client.tokenize(prompt) if isinstance(prompt, str) else prompt
        check_prompt_length(settings, len(ids))
        requests.append(
            LLMGenerationRequest(
                ids,
                params=params,
                task=task,
                caller=caller_of(request.scope),
                priority=-(priority or 0),
                cache_salt=cache_salt or "",
                queue_timeout=settings.queue_timeout,
                timeout=settings.request_timeout,
            )
        )
    total = sum(len(one.prompt or ()) for one in requests) * params.n
    most = client.card.max_pending_tokens
    if len(requests) > 1 and most is not None and total > most:
        # Together they would be refused for ever, since none of them may wait beside the others.
        message = f"{total} tokens in all prompts, and no more than {most} may be pending"
        raise UnsupportedRequestError("prompt", message)
    if connection.gone:
        raise RequestCancelledError("the client has gone")
    handles: list[ClientHandle] = []
    try:
        for one in requests:
            handles.append(await client.submit(one))
            connection.on_gone(handles[-1].cancel)
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
    return Run(serving, connection, handles, params.n, began)


def check_prompt_length(settings: ServerSettings, tokens: int) -> None:
    """Raise ContextLengthError for a prompt beyond the server's own limit."""
    most = settings.max_prompt_tokens
    if most is not None and tokens > most:
        raise ContextLengthError(
            "prompt", f"has {tokens} tokens, the limit is {most}", needed=tokens, available=most
        )


def total_usage(usages: Sequence[Usage]) -> Usage:
    """The sum."""
    return Usage(
        sum(one.prompt_tokens for one in usages),
        sum(one.completion_tokens for one in usages),
        sum(one.cached_tokens for one in usages),
    )
