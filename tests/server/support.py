"""A server over a scripted engine, driven step by step, and requests made by hand at ASGI level."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pytest

from steppe import LLM, EngineConfig, RequestEngine, ShutdownMode
from steppe.client import LocalClient, ModelCard
from steppe.server.app import create_app
from steppe.server.settings import ServerSettings
from steppe.testing import FakeClock, Script, ScriptedRuntime, assert_idle_clean
from steppe.text.chat_template import ChatTemplate
from tests.runtime.fakes import TEMPLATE, FakeBackend, byte_tokenizer
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from fastapi import FastAPI

    from steppe.text.tokenizer import Tokenizer

SPEC_VERSIONS = ("2.3", "2.4")
"""Before and from 2.4 on, frameworks notice a disconnect in different ways."""


async def settle(turns: int = 50) -> None:
    """Let everything that can run on the event loop run."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread or a timer brings about; fail after a while."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - nothing tells us
            await asyncio.sleep(0.001)


def hurry(seconds: float) -> None:
    """Let the timers of this event loop believe that so much time has passed."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


@dataclass
class Stage:
    """An application over a scripted engine, whose steps the test takes unless it has a thread."""

    script: Script = field(default_factory=Script)
    settings: ServerSettings = field(default_factory=ServerSettings)
    max_batch_size: int = 4
    max_pending: int = 16
    max_pending_tokens: int | None = None
    max_step_tokens: int | None = None
    hang_limit: float | None = None
    chat: bool = True
    template: str = TEMPLATE
    threaded: bool = False
    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)
    scheduling: Literal["fcfs", "fair"] = "fcfs"

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.runtime = ScriptedRuntime(self.script)
        config = EngineConfig(
            max_batch_size=self.max_batch_size,
            command_queue_capacity=max(64, self.max_pending),
            max_pending_requests=self.max_pending,
            max_pending_tokens=self.max_pending_tokens,
            max_step_tokens=self.max_step_tokens,
            scheduling=self.scheduling,
            hang_limit=self.hang_limit,
            clock=time.monotonic if self.threaded else self.clock,
        )
        if self.threaded:
            self.engine = RequestEngine(self.runtime, config)
        else:
            self.engine = RequestEngine.from_factory(
                self.runtime.begin_stepped, config, manual=True
            )
        tokenizer = self.tokenizer
        card = ModelCard(
            name="scripted",
            context_length=self.script.context,
            vocab_size=tokenizer.vocab_size,
            max_batch_size=self.max_batch_size,
            max_pending=self.max_pending,
            max_pending_tokens=self.max_pending_tokens,
            has_chat_template=self.chat,
            scheduling=self.scheduling,
            cache_tokens=self.script.pages and self.script.pages * self.script.page_size,
        )
        self.client = LocalClient(
            self.engine,
            tokenizer=tokenizer,
            card=card,
            chat_template=ChatTemplate(self.template) if self.chat else None,
            clock=self.clock,
        )
        self.app: FastAPI = create_app(self.client, self.settings)

    async def step(self, times: int = 1) -> None:
        """Take that many steps, and let the loop see each."""
        await settle()
        for _ in range(times):
            self.engine.tick()
            await settle()

    async def run(self, call: Call) -> Call:
        """Step until ``call`` has its whole answer."""
        await settle()
        if self.threaded:
            await until(lambda: call.done)
        while not call.done:
            if not self.engine.tick():
                await asyncio.sleep(0.001)  # a thread may be tokenizing
            await settle()
        call.task.result()
        return call

    def call(self, path: str, body: Any = None, **how: Any) -> Call:
        """Begin a request."""
        return Call(self.app, path, body, **how)

    async def ask(self, path: str, body: Any = None, **how: Any) -> Call:
        """A request from beginning to end."""
        return await self.run(self.call(path, body, **how))


def fake_llm(folder: Path, **how: Any) -> LLM:
    """The tiny model behind a real engine and runtime; only its arithmetic is made up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steppe.llm.create_backend", lambda *_, **__: FakeBackend())
        return LLM(write_tiny_model(folder / "tiny", temperature=0.0), **how)


async def ask(app: FastAPI, path: str, body: Any = None, **how: Any) -> Call:
    """A request from beginning to end, to an engine with a thread."""
    call = Call(app, path, body, **how)
    await until(lambda: call.done)
    call.task.result()
    return call


@asynccontextmanager
async def staged(**how: Any) -> AsyncIterator[Stage]:
    """A stage whose engine must hold nothing in the end."""
    stage = Stage(**how)
    yield stage
    while not stage.threaded and stage.engine.tick():
        pass
    await settle()
    assert_idle_clean(stage.engine)
    stage.engine.shutdown(ShutdownMode.CANCEL)


class Call:
    """One request to an ASGI application, with both sides in the test's hands."""

    def __init__(
        self,
        app: Callable[..., Any],
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        query: str = "",
        headers: dict[str, str] | None = None,
        spec: str = "2.3",
        deaf: int | None = None,
    ) -> None:
        raw = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        given = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec},
            "http_version": "1.1",
            "method": method or ("GET" if body is None else "POST"),
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in given.items()],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self._spec = tuple(map(int, spec.split(".")))
        self._deaf = deaf
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        self._left = False
        self.messages: list[dict[str, Any]] = []
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        if self._left and self._spec >= (2, 4):
            raise OSError("the client has gone")
        self.messages.append(message)
        if self._deaf is not None and len(self.messages) > self._deaf:
            await asyncio.Event().wait()  # takes nothing more, and never hangs up

    def disconnect(self) -> None:
        """The client leaves."""
        self._left = True
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def done(self) -> bool:
        """Whether the application is done with it."""
        return self.task.done()

    @property
    def status(self) -> int | None:
        """The status, once it is decided."""
        return self.messages[0]["status"] if self.messages else None

    @property
    def headers(self) -> dict[str, str]:
        """The response's headers."""
        return {k.decode(): v.decode() for k, v in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        """What has been sent so far."""
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def json(self) -> Any:
        """The body, strictly parsed."""
        return json.loads(self.body, parse_constant=lambda name: 1 / 0)

    @property
    def error(self) -> dict[str, Any]:
        """The error object."""
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The data of each event so far, parsed; ``[DONE]`` as it is."""
        blocks = self.body.decode().split("\n\n")
        lines = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


def chat(content: str = "hi", **fields: Any) -> dict[str, Any]:
    """The body of a chat completion."""
    return {"messages": [{"role": "user", "content": content}], **fields}


def text_of(events: list[Any], index: int = 0) -> str:
    """The content that a chat stream carries for one choice."""
    return "".join(
        choice["delta"].get("content") or ""
        for one in events
        if isinstance(one, dict)
        for choice in one.get("choices", ())
        if choice["index"] == index
    )
