"""The near end of an engine that is in another process, wherever that is: messages go out and come
in through frames, and this is what they mean.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from steppe.errors import ConfigError, ReplicaLostError, SubmitError
from steppe.replicas.output import OutputChannel
from steppe.replicas.runners import codec
from steppe.replicas.runners.frames import FrameProtocol
from steppe.replicas.vocabulary import RunnerStatus, TokenChunk, TransportKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from steppe.client import ModelCard
    from steppe.engine.activity import EngineActivity
    from steppe.replicas.vocabulary import ExecuteBatch
    from steppe.text.reasoning.families import ReasoningFormat
    from steppe.text.tools.parser import ToolFormat

__all__ = ["ChildSpec", "Peer", "PeerRunner"]

CHILD = "steppe.replicas.runners.child"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What a child process is to run: ``factory`` is ``module:function``, called there with
    ``options`` (JSON values), and returns a ``LocalClient``. ``cores`` are the processors it may
    use; None leaves it all of them. ``environment`` are variables that it has beside those of this
    process, or instead of them: ``CUDA_VISIBLE_DEVICES`` gives it GPUs of its own.

    Raises ConfigError naming the field.
    """

    factory: str = f"{CHILD}:load_model"
    options: Mapping[str, Any] = field(default_factory=dict)
    cores: Sequence[int] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise ConfigError("environment", f"{name!r} cannot be set to {value!r}")
        module, colon, name = self.factory.partition(":")
        if not (module and colon and name):
            raise ConfigError("factory", f"must be module:function, not {self.factory!r}")


class PeerRunner(ABC):
    """A ``ModelRunner`` whose engine is at the other end of a ``Peer``."""

    reads_text = False

    def __init__(
        self,
        spec: ChildSpec,
        *,
        transport_kind: TransportKind = TransportKind.LOCAL_CPU,
        reasoning: ReasoningFormat | None = None,
        tools: ToolFormat | None = None,
    ) -> None:
        self.transport_kind = transport_kind
        self._spec = spec
        self._formats = {"reasoning": reasoning, "tools": tools}
        self._card: ModelCard | None = None
        self._peer: Peer | None = None

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise SubmitError("unavailable", "the process has not been started")
        return self._card

    def another(self) -> Self:
        """A runner of the same kind, not started yet, for a replica that takes this one's place."""
        return type(self)(self._spec, transport_kind=self.transport_kind, **self._formats)  # type: ignore[arg-type]

    @abstractmethod
    async def _connect(self) -> Peer:
        """Begin a process that waits to be told what to load. Leaves nothing if it raises."""

    @abstractmethod
    async def _end(self, peer: Peer) -> None:
        """End that process now, whatever it is doing."""

    async def start(self) -> None:
        await self.close()
        peer = self._peer = await self._connect()
        try:
            card = await peer.ask(
                "load",
                self._spec.factory,
                dict(self._spec.options),
                None if self._spec.cores is None else list(self._spec.cores),
            )
            self._card = replace(codec.read_card(card), **self._formats)  # type: ignore[arg-type]
        except BaseException:
            await self.close()
            raise

    async def lost(self) -> Exception:
        return await asyncio.shield(self._alive().gone)

    async def execute(self, batch: ExecuteBatch) -> PeerStream:
        stream = self._alive().open(batch)
        try:
            await stream.output.accepted()
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def status(self) -> RunnerStatus:
        return codec.read_status(await self._alive().ask("status"))

    async def activity(self, after: int = 0) -> EngineActivity:
        return codec.read_activity(await self._alive().ask("activity", after))

    async def close(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            await self._end(peer)

    def _alive(self) -> Peer:
        if self._peer is None:
            raise ReplicaLostError("the process is gone")
        return self._peer


class PeerStream:
    """The chunks of one request that a peer runs."""

    __slots__ = ("_peer", "_request_id", "output")

    def __init__(self, peer: Peer, request_id: int) -> None:
        self.output = OutputChannel()
        self._peer = peer
        self._request_id = request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        chunk = await self.output.pop()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        self._peer.forget(self._request_id)
        self.output.cancel()


class Peer:
    """One process with an engine, and everything that waits for it. ``name`` is for messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gone: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.frames = FrameProtocol(self._on_message, self._on_end)
        self._streams: dict[int, PeerStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)

    def open(self, batch: ExecuteBatch) -> PeerStream:
        """Send a request. Its output tells what becomes of it."""
        stream = PeerStream(self, batch.request_id)
        self._streams[batch.request_id] = stream
        self._send(["execute", batch.request_id, codec.write_request(batch.request)])
        return stream

    def forget(self, request_id: int) -> None:
        """Nobody reads that one any more."""
        stream = self._streams.pop(request_id, None)
        if stream is not None and not stream.output.done and not self.gone.done():
            self.frames.send(["cancel", request_id])

    async def ask(self, *question: Any) -> Any:
        """Send a question and wait for its answer. Raises what it answers, ReplicaLostError."""
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(["ask", number, *question])
            return await answer
        finally:
            del self._calls[number]

    def _send(self, message: list[Any]) -> None:
        if self.gone.done():
            raise ReplicaLostError(str(self.gone.result()))
        self.frames.send(message)

    def _on_message(self, message: list[Any]) -> None:
        kind, number, *rest = message
        if kind == "chunk":
            stream = self._streams.get(number)
            if stream is not None:
                stream.output.push(codec.read_chunk(rest))
        elif kind == "accepted":
            if (stream := self._streams.get(number)) is not None:
                stream.output.accept()
        elif kind == "end":
            (error,) = rest
            if (stream := self._streams.pop(number, None)) is not None:
                stream.output.close(None if error is None else codec.read_error(error))
        elif kind == "answer":
            error, value = rest
            call = self._calls.get(number)
            if call is None or call.done():
                return
            if error is None:
                call.set_result(value)
            else:
                call.set_exception(codec.read_error(error))
        else:
            raise ValueError(f"no message is a {kind!r}")

    def _on_end(self, reason: str) -> None:
        """The process is gone, or as good as gone."""
        error = ReplicaLostError(f"{self.name}: {reason}")
        self.gone.set_result(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(ReplicaLostError(str(error)))
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.output.close(ReplicaLostError(str(error)))
