"""The HTTP client against scripted servers: what it sends, what it reads, how it fails."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.bench.http import HttpTarget
from steppe.bench.target import AnswerError, Counts
from steppe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class ScriptedServer:
    """Answers every connection with the same bytes, in pieces, and keeps what it was sent."""

    def __init__(self, *pieces: bytes, hang: bool = False) -> None:
        self.pieces = pieces
        self.hang = hang
        self.heads: list[list[str]] = []
        self.bodies: list[bytes] = []
        self.gone = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(int(line[15:]) for line in head if line.startswith("content-length:"))
        self.heads.append(head)
        self.bodies.append(await reader.readexactly(length))
        try:
            for piece in self.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if self.hang:
                await reader.read()
        except ConnectionError:
            pass
        self.gone.set()
        writer.close()


@asynccontextmanager
async def scripted(*pieces: bytes, hang: bool = False) -> AsyncIterator[ScriptedServer]:
    script = ScriptedServer(*pieces, hang=hang)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield script


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def text(value: str) -> bytes:
    return event({"choices": [{"index": 0, "text": value}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
DONE = event(b"[DONE]")
ANSWER = text("a") + b": a comment\n\n" + text("") + text("bc") + USAGE + DONE


def chunked(body: bytes, sizes: list[int]) -> bytes:
    """``body`` in chunks of those sizes, over and over, as HTTP/1.1 frames them."""
    out, at = b"", 0
    while at < len(body):
        part = body[at : at + sizes[len(out) % len(sizes)]]
        out += b"%x;note=1\r\n%s\r\n" % (len(part), part)
        at += len(part)
    return out + b"0\r\ntrailer: x\r\n\r\n"


async def ask(url: str, **how: Any) -> tuple[Counts, int]:
    """One answer's counts, and how many chunks of text came."""
    texts: list[None] = []
    counts = await HttpTarget(url, **how).answer("hello you", 7, lambda: texts.append(None))
    return counts, len(texts)


async def failure(*pieces: bytes) -> str:
    async with scripted(*pieces) as server:
        with pytest.raises(AnswerError) as caught:
            await ask(server.url)
    return caught.value.kind


async def test_a_completion_is_asked_for_as_servers_expect() -> None:
    async with scripted(OK + b"\r\n", ANSWER) as server:
        counts, texts = await ask(server.url, model="m", api_key="secret")
        assert (counts, texts) == (Counts(5, 3), 2)
        (head,) = server.heads
        assert head[0] == "POST /v1/completions HTTP/1.1"
        assert f"host: {server.url.removeprefix('http://')}" in head
        assert "authorization: Bearer secret" in head
        assert json.loads(server.bodies[0]) == {
            "model": "m",
            "prompt": "hello you",
            "max_tokens": 7,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }


async def test_a_chat_and_its_deltas() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "x"}, {"content": None}, {}]
    body = b"".join(event({"choices": [{"delta": delta}]}) for delta in deltas) + DONE
    async with scripted(OK + b"\r\n" + body) as server:
        counts, texts = await ask(f"{server.url}/v1/", chat=True, ignore_eos=False)
        assert (counts, texts) == (Counts(), 1)
        assert server.heads[0][0] == "POST /v1/chat/completions HTTP/1.1"
        sent = json.loads(server.bodies[0])
        assert sent["messages"] == [{"role": "user", "content": "hello you"}]
        assert "ignore_eos" not in sent
        assert "prompt" not in sent
        assert not any(line.startswith("authorization") for line in server.heads[0])


async def test_a_server_below_a_path_is_found_there() -> None:
    async with scripted(OK + b"\r\n" + ANSWER) as server:
        await ask(f"{server.url}/behind/proxy")
        assert server.heads[0][0] == "POST /behind/proxy/v1/completions HTTP/1.1"


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 200))
async def test_every_framing_of_a_body_reads_the_same(sizes: list[int], cut: int) -> None:
    bodies = (
        b"transfer-encoding: Chunked\r\n\r\n" + chunked(ANSWER, sizes),
        b"content-length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER),
        b"\r\n" + ANSWER,
        b"\r\n" + ANSWER.replace(b"\n", b"\r\n"),
    )
    for body in bodies:
        whole = OK + body
        pieces = [whole[at : at + cut] for at in range(0, len(whole), cut)]
        async with scripted(*pieces) as server:
            assert await ask(server.url) == (Counts(5, 3), 2)


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
async def test_a_refusal_is_counted_by_its_status(status: int) -> None:
    assert await failure(b"HTTP/1.1 %d Some Words\r\ncontent-length: 2\r\n\r\nno" % status) == (
        f"http_{status}"
    )


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "broken_stream"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + text("a"), "broken_stream"),
        (OK + b"content-length: 999\r\n\r\n" + text("a"), "broken_stream"),
        (OK + b"transfer-encoding: chunked\r\n\r\n20\r\nda", "broken_stream"),
        (OK + b"transfer-encoding: chunked\r\n\r\n", "broken_stream"),
        (OK + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", "protocol"),
        (OK + b"content-length: many\r\n\r\n", "protocol"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "protocol"),
        (OK + b"\r\n" + event(b"{") + DONE, "protocol"),
        (OK + b"\r\n" + event([1]) + DONE, "protocol"),
        (OK + b"\r\n" + text("a") + event({"error": {"code": "timeout"}}), "stream_timeout"),
        (OK + b"\r\n" + event({"error": "words"}), "stream_error"),
        (OK + b"x: " + b"y" * (2**20 + 1) + b"\r\n\r\n", "protocol"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_every_failure_has_a_kind(answer: bytes, kind: str) -> None:
    assert await failure(answer) == kind


async def test_nobody_there() -> None:
    async with scripted() as server:
        url = server.url
    with pytest.raises(AnswerError) as caught:
        await ask(url)
    assert caught.value.kind == "connect"


async def test_leaving_early_hangs_up() -> None:
    async with scripted(OK + b"\r\n" + text("a"), hang=True) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await ask(server.url)
        async with asyncio.timeout(10):
            await server.gone.wait()


async def test_the_first_model_is_taken_unless_one_is_named() -> None:
    body = json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode()
    async with scripted(OK + b"content-length: %d\r\n\r\n%s" % (len(body), body)) as server:
        target = HttpTarget(server.url)
        await target.find_model()
        assert target.name.startswith("first at 127.0.0.1:")
        assert server.heads[0][0] == "GET /v1/models HTTP/1.1"
        await HttpTarget(server.url, model="mine").find_model()
        assert len(server.heads) == 1


@pytest.mark.parametrize("body", [b"{}", b'{"data":[]}', b"no", b'{"data":[1]}'])
async def test_a_list_of_models_that_is_none(body: bytes) -> None:
    async with scripted(OK + b"\r\n" + body) as server:
        with pytest.raises(AnswerError) as caught:
            await HttpTarget(server.url).find_model()
    assert caught.value.kind == "protocol"


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://a", "http://", "http://a:port"])
async def test_a_url_must_be_one(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        HttpTarget(url)
