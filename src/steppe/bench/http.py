"""A client for OpenAI-compatible servers that adds as little as it can to what it measures.

HTTP/1.1 over asyncio streams, written by hand on purpose: on a machine that the server shares, the
time that a full client spends per chunk would be counted as the server's. A connection carries one
request, so a connection's set-up is part of the time to the first token.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from steppe.bench.target import AnswerError, Counts
from steppe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

__all__ = ["HttpTarget"]

LIMIT = 2**20
"""Longest line of a response, in bytes."""
BODY_LIMIT = 2**24


@dataclass(slots=True)
class Reply:
    """A response whose head has been read."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def parts(self) -> AsyncGenerator[bytes]:
        """The body as it arrives. Raises AnswerError for one that is cut short."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := _number((await self._line()).partition(b";")[0], 16):
                yield await self.reader.readexactly(size)
                await self._line()
            while await self._line():
                pass  # trailers
            return
        length = self.headers.get("content-length")
        if length is not None:
            left = _number(length.encode(), 10)
            while left > 0:
                part = await self.reader.read(min(left, LIMIT))
                if not part:
                    raise AnswerError("broken_stream", "the body ended early")
                left -= len(part)
                yield part
            return
        while part := await self.reader.read(LIMIT):
            yield part

    async def _line(self) -> bytes:
        line = await self.reader.readline()
        if not line.endswith(b"\n"):
            raise AnswerError("broken_stream", "the connection was closed early")
        return line.strip()

    async def lines(self) -> AsyncGenerator[bytes]:
        """The body line by line, without the ends."""
        pending = b""
        async for part in self.parts():
            *lines, pending = (pending + part).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
        if pending:
            yield pending

    async def body(self) -> bytes:
        """All of it. Raises AnswerError beyond 16 MiB."""
        whole = bytearray()
        async for part in self.parts():
            whole += part
            if len(whole) > BODY_LIMIT:
                raise AnswerError("protocol", "the body is too long")
        return bytes(whole)


def _number(text: bytes, base: int) -> int:
    try:
        return int(text, base)
    except ValueError:
        raise AnswerError("protocol", f"{text[:40]!r} is no length") from None


class HttpTarget:
    """A server's ``/v1/completions``, or ``/v1/chat/completions``, streamed.

    ``url`` is the server's, with or without ``/v1``. Raises ConfigError for one that is not http.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        chat: bool = False,
        ignore_eos: bool = True,
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError("url", f"{url!r} is not like http://127.0.0.1:8000")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        base = parts.path.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._authority = parts.netloc.rpartition("@")[2]
        self._api_key = api_key
        self._model = model
        self._chat = chat
        self._ignore_eos = ignore_eos

    @property
    def name(self) -> str:
        return f"{self._model or 'the model'} at {self._authority}"

    async def find_model(self) -> None:
        """Take the first model that the server lists, unless one was named. Raises AnswerError."""
        if self._model is None:
            async with self._request("GET", "/models", b"") as reply:
                body = await reply.body()
                if reply.status != 200:
                    raise _refusal(reply.status, body)
            try:
                self._model = str(json.loads(body)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise AnswerError("protocol", "the list of models is not one") from None

    async def answer(self, prompt: str, output_tokens: int, on_text: Callable[[], None]) -> Counts:
        path, body = self._question(prompt, output_tokens)
        counts, ended = Counts(), False
        async with self._request("POST", path, json.dumps(body).encode()) as reply:
            if reply.status != 200:
                raise _refusal(reply.status, await reply.body())
            async for line in reply.lines():
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    ended = True
                    break
                counts = _take(data, counts, on_text)
        if not ended:
            raise AnswerError("broken_stream", "no [DONE] came")
        return counts

    def _question(self, prompt: str, output_tokens: int) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._chat:
            return "/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
        return "/completions", {**body, "prompt": prompt}

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: bytes) -> AsyncIterator[Reply]:
        """One connection for one request; closed on every way out, which cancels the request."""
        try:
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls, limit=LIMIT
            )
        except OSError as error:
            raise AnswerError("connect", str(error)) from error
        try:
            head = [
                f"{method} {self._base}{path} HTTP/1.1",
                f"host: {self._authority}",
                "accept: application/json, text/event-stream",
                "connection: close",
                f"content-length: {len(body)}",
            ]
            if body:
                head.append("content-type: application/json")
            if self._api_key:
                head.append(f"authorization: Bearer {self._api_key}")
            writer.write("\r\n".join([*head, "", ""]).encode("latin-1") + body)
            await writer.drain()
            yield await _reply(reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise AnswerError("broken_stream", str(error)) from error
        except ValueError as error:  # how a stream reader says that a line is beyond its limit
            raise AnswerError("protocol", str(error)) from error
        finally:
            writer.transport.abort()


async def _reply(reader: asyncio.StreamReader) -> Reply:
    status = await reader.readline()
    words = status.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        kind = "protocol" if status else "broken_stream"
        raise AnswerError(kind, f"{status[:60]!r} is no status line")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return Reply(int(words[1]), headers, reader)


def _refusal(status: int, body: bytes) -> AnswerError:
    return AnswerError(f"http_{status}", body[:300].decode("utf-8", "replace"))


def _take(data: bytes, counts: Counts, on_text: Callable[[], None]) -> Counts:
    """Take one event in. Raises AnswerError for one that says the request failed."""
    try:
        event = json.loads(data)
    except ValueError:
        raise AnswerError("protocol", f"{data[:60]!r} is not JSON") from None
    if not isinstance(event, dict):
        raise AnswerError("protocol", f"{data[:60]!r} is no event")
    if error := event.get("error"):
        code = error.get("code") if isinstance(error, dict) else None
        raise AnswerError(f"stream_{code or 'error'}", str(error)[:300])
    for choice in event.get("choices") or ():
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            on_text()
    if usage := event.get("usage"):
        return Counts(usage.get("prompt_tokens"), usage.get("completion_tokens"))
    return counts
