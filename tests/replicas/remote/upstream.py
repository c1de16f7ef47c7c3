"""A server that plays a script, as the transport of a client: no sockets, and virtual time."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx2

from steppe.replicas.remote.config import RemoteConfig
from steppe.replicas.remote.runner import RemoteRunner
from steppe.replicas.runners.scripted import scripted_card

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

MODELS = {"object": "list", "data": [{"id": "far", "max_model_len": 2048}, {"id": "other"}]}
SSE = {"content-type": "text/event-stream"}


def data(value: object) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"data: {text}\n\n".encode()


def token(number: int, index: int = 0, finish: str | None = None) -> bytes:
    choice: dict[str, Any] = {"index": index, "text": f"{number} ", "finish_reason": finish}
    return data({"choices": [{**choice, "token_ids": [number]}]})


def usage(prompt: int = 3, completion: int = 2, cached: int = 0) -> bytes:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return data({"choices": [], "usage": {**counts, "prompt_tokens_details": details}})


DONE = data("[DONE]")
GOOD = (token(1), token(2, finish="length"), usage(), DONE)


@dataclass
class Part:
    """``content`` after ``delay`` seconds; or an error then."""

    content: bytes | Exception
    delay: float = 0.0


@dataclass
class Reply:
    """How one request is answered. ``error`` instead of a head."""

    parts: Sequence[bytes | Part] = GOOD
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: dict(SSE))
    delay: float = 0.0
    error: Exception | None = None


def refusal(status: int, headers: dict[str, str] | None = None, **error: object) -> Reply:
    return Reply((json.dumps({"error": error}).encode(),), status, headers or {})


class Body(httpx2.AsyncByteStream):
    def __init__(self, upstream: Upstream, parts: Sequence[bytes | Part]) -> None:
        self._upstream = upstream
        self._parts = parts
        self._open = True
        upstream.open += 1

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        for given in self._parts:
            part = given if isinstance(given, Part) else Part(given)
            await read(self._upstream, part.delay)
            if isinstance(part.content, Exception):
                raise part.content
            yield part.content

    async def aclose(self) -> None:
        self._upstream.open -= self._open
        self._open = False


async def read(upstream: Upstream, delay: float) -> None:
    """Wait as a socket does: for ``delay``, or until the read times out."""
    limit = upstream.read_timeout
    if limit is not None and delay >= limit:
        await asyncio.sleep(limit)
        raise httpx2.ReadTimeout("silent")
    await asyncio.sleep(delay)


class Upstream(httpx2.AsyncBaseTransport):
    """Answers each POST with the next reply, or with what ``replies`` makes of its body."""

    def __init__(self, *replies: Reply, make: Callable[[dict[str, Any]], Reply] | None = None):
        self.replies = list(replies)
        self.make = make
        self.models: Any = MODELS
        self.health = Reply((b'{"queued": 2, "resident": 3}',))
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.at: list[float] = []
        self.headers: httpx2.Headers | None = None
        self.open = 0
        self.read_timeout: float | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.headers = request.headers
        self.read_timeout = request.extensions["timeout"]["read"]
        if request.url.path.endswith("/models"):
            return httpx2.Response(200, json=self.models)
        if request.url.path == "/health":
            reply = self.health
        else:
            self.paths.append(request.url.path)
            self.bodies.append(json.loads(await request.aread()))
            self.at.append(asyncio.get_running_loop().time())
            reply = self.make(self.bodies[-1]) if self.make else self.replies.pop(0)
        await asyncio.sleep(reply.delay)
        if reply.error is not None:
            raise reply.error
        return httpx2.Response(reply.status, headers=reply.headers, stream=Body(self, reply.parts))


async def started(upstream: Upstream, **settings: Any) -> RemoteRunner:
    """A runner that has begun. Pauses between tries take half of what they may."""
    config = RemoteConfig("http://far:8000", **settings)
    runner = RemoteRunner(config, scripted_card(), transport=upstream, draw=Half())
    await runner.start()
    return runner


class Half(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2
