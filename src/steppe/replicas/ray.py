"""Replicas on other machines: each engine in a Ray actor (extra ``ray``).

An actor holds what a child process holds, and the same frames go to and fro: Ray places it, starts
it, carries the bytes, and says when it is gone.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.exceptions import RayError

from steppe.errors import ConfigError, ReplicaLostError
from steppe.replicas.runners.child import Child
from steppe.replicas.runners.peer import ChildSpec, Peer, PeerRunner
from steppe.replicas.vocabulary import TransportKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from steppe.replicas.runners.frames import FrameProtocol

__all__ = ["RayResources", "RayRunner", "join_cluster"]

WAITING_BYTES = 2**20
"""Bytes on their way out of an actor from which on its engine's chunks are merged instead."""
UNREAD = 64
"""Packets that Ray carries ahead of whoever takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayResources:
    """What an actor takes of the machine that it is placed on, in Ray's terms.

    ``resources`` are custom ones. ``start_timeout`` bounds the wait for a place, in seconds.
    Raises ConfigError.
    """

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    start_timeout: float = 120.0

    def __post_init__(self) -> None:
        for name in ("num_cpus", "num_gpus"):
            if not getattr(self, name) >= 0:
                raise ConfigError(name, f"must be at least 0, not {getattr(self, name)}")
        if not self.start_timeout > 0:
            raise ConfigError("start_timeout", f"must be more than 0, not {self.start_timeout}")


def join_cluster(address: str = "auto") -> None:
    """Connect this process to a running cluster, once. Raises ConfigError if there is none."""
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RayError, ValueError) as error:
        raise ConfigError("ray", f"no Ray cluster at {address}: {error}") from error


class EngineHost:
    """What an actor runs: one engine, and its end of the frames. Bytes come in through ``feed``, in
    numbered packets, as the calls of an asynchronous actor may overtake each other.
    """

    def __init__(self) -> None:
        self._wire: Outgoing | None = None
        self._early: dict[int, bytes] = {}
        self._next = 0

    async def pid(self) -> int:
        """Its process. Answered once the actor has a place and stands."""
        return os.getpid()

    async def outgoing(self) -> AsyncGenerator[bytes, None]:
        """Everything that is sent from here, as long as the connection stands. Called once."""
        self._wire = wire = Outgoing()
        child = Child(wire.close)
        wire.frames = child.frames
        child.frames.connection_made(wire)
        self._take()
        while (data := await wire.read()) is not None:
            yield data

    async def feed(self, number: int, data: bytes) -> None:
        """The packet of that number, which count from 0."""
        self._early[number] = data
        self._take()

    def _take(self) -> None:
        if self._wire is None:
            return
        while (data := self._early.pop(self._next, None)) is not None:
            self._next += 1
            self._wire.frames.data_received(data)


class Outgoing(asyncio.Transport):
    """The actor's way out: what is written waits until it is read."""

    frames: FrameProtocol

    def __init__(self) -> None:
        super().__init__()
        self._data = bytearray()
        self._some = asyncio.Event()
        self._closed = False
        self._paused = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._data += data
        self._some.set()
        if not self._paused and len(self._data) > WAITING_BYTES:
            self._paused = True
            self.frames.pause_writing()

    async def read(self) -> bytes | None:
        """What was written since; None after the end."""
        await self._some.wait()
        if not self._data:
            return None
        data = bytes(self._data)
        self._data.clear()
        if not self._closed:
            self._some.clear()
        if self._paused:
            self._paused = False
            self.frames.resume_writing()
        return data

    def close(self) -> None:
        self._closed = True
        self._some.set()

    def abort(self) -> None:
        self.close()


class RayRunner(PeerRunner):
    """A ``ModelRunner`` in a Ray actor. Needs ``join_cluster``. The actor ends with this process.

    ``spec.cores`` and ``spec.environment`` have no meaning there: ``resources`` say what the actor
    may use, its GPUs among it. Raises ConfigError for a spec that has them.
    """

    def __init__(
        self,
        spec: ChildSpec,
        resources: RayResources | None = None,
        **more: Any,
    ) -> None:
        if spec.cores is not None:
            raise ConfigError("cores", "Ray places an actor by its resources, not by cores")
        if spec.environment:
            raise ConfigError("environment", "Ray gives an actor its environment, and its GPUs")
        super().__init__(spec, **{"transport_kind": TransportKind.REMOTE_NETWORK, **more})
        self._resources = resources or RayResources()
        self._wire: ActorWire | None = None
        self._pid: int | None = None

    @property
    def pid(self) -> int | None:
        """The actor's process id, on whatever machine it is, while there is one."""
        return self._pid

    def another(self) -> Self:
        return type(self)(
            self._spec, self._resources, transport_kind=self.transport_kind, **self._formats
        )

    async def _connect(self) -> Peer:
        wanted = self._resources
        host = ray.remote(EngineHost).options(
            num_cpus=wanted.num_cpus,
            num_gpus=wanted.num_gpus,
            resources=dict(wanted.resources),
            # A lost actor is begun anew by whoever supervises this runner.
            max_restarts=0,
            max_concurrency=1000,
        )
        actor: Any = host.remote()
        peer = Peer("the Ray actor")
        self._wire = wire = ActorWire(actor, peer.frames)
        try:
            async with asyncio.timeout(wanted.start_timeout):
                self._pid = await actor.pid.remote()
        except TimeoutError:
            await self._end(peer)
            raise ReplicaLostError(
                f"the cluster had no room for the actor within {wanted.start_timeout:g} s"
            ) from None
        except RayError as error:
            await self._end(peer)
            raise ReplicaLostError(f"the actor did not start: {error}") from error
        except asyncio.CancelledError:
            await self._end(peer)
            raise
        wire.begin()
        return peer

    async def _end(self, peer: Peer) -> None:
        wire, self._wire = self._wire, None
        self._pid = None
        if wire is not None:
            await wire.end()


class ActorWire(asyncio.Transport):
    """Our way to an actor, and the task that takes what comes from it."""

    def __init__(self, actor: Any, frames: FrameProtocol) -> None:
        super().__init__()
        self._actor = actor
        self._frames = frames
        self._sent = 0
        self._reader: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Connect the frames."""
        self._frames.connection_made(self)
        self._reader = asyncio.get_running_loop().create_task(self._read())

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._actor.feed.remote(self._sent, bytes(data))
        self._sent += 1

    def abort(self) -> None:
        ray.kill(self._actor)

    async def end(self) -> None:
        """Kill the actor; the frames end with it."""
        self._frames.abort("it was ended")
        self.abort()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def _read(self) -> None:
        packets = self._actor.outgoing.options(
            num_returns="streaming", _generator_backpressure_num_objects=UNREAD
        ).remote()
        why: Exception = ConnectionError("the actor closed it")
        try:
            async for packet in packets:
                self._frames.data_received(await packet)
        except RayError as error:
            why = error
        self._frames.connection_lost(why)
