"""The process of one replica: an engine, and the socket that its server speaks to it through.

Run as ``python -m steppe.replicas.runners.child FD``. When the other end of the socket closes, for
whatever reason, this process ends.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from steppe.errors import ConfigError, NetworkError
from steppe.replicas.runners import codec
from steppe.replicas.runners.frames import FrameProtocol
from steppe.replicas.runners.local import LocalRunner
from steppe.replicas.vocabulary import ExecuteBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.client import LocalClient

__all__ = ["Child", "load_model", "main"]


def load_model(**options: Any) -> LocalClient:
    """The usual factory: ``LLM(**options)`` and its client."""
    from steppe.client import LocalClient
    from steppe.llm import LLM

    return LocalClient.of(LLM(**options))


class Child:
    """One engine, served to one peer. One event loop."""

    def __init__(self, on_end: Callable[[], object]) -> None:
        self.frames = FrameProtocol(self._on_message, lambda reason: on_end())
        self._runner: LocalRunner | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: set[asyncio.Task[None]] = set()

    def _on_message(self, message: list[Any]) -> None:
        kind, number, *rest = message
        loop = asyncio.get_running_loop()
        if kind == "execute":
            (request,) = rest
            task = loop.create_task(self._run(number, request))
            self._tasks[number] = task
            task.add_done_callback(lambda _: self._tasks.pop(number, None))
        elif kind == "cancel":
            if number in self._tasks:
                self._tasks[number].cancel()
        elif kind == "ask":
            answer = loop.create_task(self._answer(number, *rest))
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)
        else:
            raise ValueError(f"no message is a {kind!r}")

    # ---- requests --------------------------------------------------------------------------------

    async def _run(self, number: int, value: Any) -> None:
        """Run a request, and tell its chunks and its end."""
        error: Exception | None = None
        try:
            await self._stream(number, value)
        except Exception as raised:  # told, whatever it is: the other end waits for it
            error = raised
        self.frames.send(["end", number, None if error is None else codec.write_error(error)])

    async def _stream(self, number: int, value: Any) -> None:
        assert self._runner is not None
        stream = await self._runner.execute(ExecuteBatch(number, codec.read_request(value)))
        try:
            self.frames.send(["accepted", number])
            async for chunk in stream:
                self.frames.send(["chunk", number, *codec.write_chunk(chunk)])
                if chunk.usage is not None:
                    return
                # Of a peer that does not read, what comes is merged where it comes from.
                await self.frames.drained()
            raise NetworkError("the stream ended before its end")
        finally:
            await stream.aclose()

    # ---- questions -------------------------------------------------------------------------------

    async def _answer(self, number: int, question: str, *details: Any) -> None:
        try:
            answer: list[Any] = [None, await self._told(question, *details)]
        except Exception as error:  # told, whatever it is: the other end waits for it
            answer = [codec.write_error(error), None]
        self.frames.send(["answer", number, *answer])

    async def _told(self, question: str, *details: Any) -> Any:
        if question == "load":
            return await self._load(*details)
        assert self._runner is not None
        if question == "status":
            return codec.write_status(await self._runner.status())
        if question == "activity":
            return codec.write_activity(await self._runner.activity(*details))
        raise ConfigError("question", f"{question!r} has no answer")

    async def _load(self, factory: str, options: dict[str, Any], cores: list[int] | None) -> Any:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        module, _, name = factory.partition(":")
        make: Callable[..., LocalClient] = getattr(importlib.import_module(module), name)
        self._runner = LocalRunner(lambda: make(**options))
        await self._runner.start()
        return codec.write_card(self._runner.card)


async def _serve(sock: socket.socket) -> None:
    # Nothing to be orderly about: whoever wanted an answer is gone.
    child = Child(lambda: os._exit(0))
    sock.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: child.frames, sock=sock)
    await asyncio.get_running_loop().create_future()


def main(arguments: list[str] | None = None) -> None:
    """Serve the socket with that descriptor until it closes."""
    (descriptor,) = sys.argv[1:] if arguments is None else arguments
    # A signal to the group is meant for the server, which decides when its replicas end.
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    asyncio.run(_serve(socket.socket(fileno=int(descriptor))))


if __name__ == "__main__":
    main()
