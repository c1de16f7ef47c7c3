"""A replica in a process of its own: it may crash, hang, or be killed, and so may its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from steppe.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    LoadTimeoutError,
    ReplicaError,
    ReplicaLostError,
    RequestCancelledError,
    SubmitError,
    UnsupportedRequestError,
)
from steppe.replicas.engine_core import EngineCoreActor
from steppe.replicas.messages import LocalEngineConfig
from steppe.replicas.output import whole_response
from steppe.replicas.runners.child import Child
from steppe.replicas.runners.frames import FrameProtocol
from steppe.replicas.runners.process import ChildSpec, ProcessRunner
from steppe.replicas.vocabulary import ReplicaState
from tests.replicas.engines import FACTORY
from tests.replicas.helpers import NoText, ask, batch, collect, settle
from tests.server.support import hurry, until
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


def spec(factory: str = "scripted", **options: Any) -> ChildSpec:
    return ChildSpec(factory=f"{FACTORY}:{factory}", options=options)


@asynccontextmanager
async def started(**options: Any) -> AsyncIterator[ProcessRunner]:
    runner = ProcessRunner(spec(**options))
    await runner.start()
    pid = runner.pid
    try:
        yield runner
    finally:
        await runner.close()
        assert pid is not None
        assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pid: int) -> bool:
    """Whether that process is no more, or is only waiting to be buried."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_requests_run_there_and_everything_comes_back() -> None:
    async with started() as runner:
        assert runner.card.name == "scripted"
        answer = whole_response(await collect(runner, batch(5, max_tokens=9, n=2)))
        assert [len(one.token_ids) for one in answer.outputs] == [9, 9]
        assert answer.usage.completion_tokens == 18

        with pytest.raises(UnsupportedRequestError) as refused:
            await collect(runner, batch(6, n=100))
        assert refused.value.field == "n"

        status = await runner.status()
        assert status.health.ok
        assert (status.metrics.submitted, status.metrics.completed) == (1, 1)

        stream = await runner.execute(batch(7, max_tokens=4000))
        await anext(stream)
        assert {one.request_id for one in (await runner.activity()).live} <= {7}
        await stream.aclose()
        await stream.aclose()
        while (await runner.status()).metrics.cancelled == 0:  # noqa: ASYNC110 - it is far away
            await asyncio.sleep(0.001)


async def test_what_its_cache_did_is_told_with_its_status(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    options = {"model": str(model), "backend": "native", "threads": 1, "kv_memory": 2**22}
    runner = ProcessRunner(ChildSpec(options=options))
    await runner.start()
    try:
        for number in (1, 2):
            await collect(runner, batch(number, prompt=150))
        cache = (await runner.status()).cache
        assert cache is not None
        assert cache.hit_sequences == 1
        assert cache.reused_tokens == 128
        assert cache.total_pages >= cache.cached_pages > 0
    finally:
        await runner.close()


async def test_cancelled_while_it_is_accepted_it_leaves_nothing_there() -> None:
    async with started(step_seconds=0.001) as runner:
        asking = asyncio.ensure_future(runner.execute(batch(1, max_tokens=4000)))
        await settle(2)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while (health := (await runner.status()).health).resident or health.queued:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_killed_it_is_lost_and_every_request_learns_of_it() -> None:
    async with started(step_seconds=0.01) as runner:
        streams = [await runner.execute(batch(number, max_tokens=4000)) for number in (1, 2, 3)]
        await anext(streams[0])
        asking = asyncio.ensure_future(runner.status())
        assert runner.pid is not None
        os.kill(runner.pid, signal.SIGKILL)
        assert isinstance(await runner.lost(), ReplicaLostError)
        for stream in streams:
            with pytest.raises(ReplicaLostError):
                async for _ in stream:
                    pass
            await stream.aclose()
        await asyncio.wait((asking,))
        with pytest.raises(ReplicaLostError):
            await runner.execute(batch(4))
        with pytest.raises(ReplicaLostError):
            await runner.status()
        # Begun anew, it is as good as new.
        await runner.start()
        assert len(await collect(runner, batch(5))) >= 1


async def test_an_actor_brings_a_killed_process_back() -> None:
    config = LocalEngineConfig(restart_pause=0.01)
    actor = EngineCoreActor(ProcessRunner(spec(step_seconds=0.01)), config, text=NoText())
    await actor.start()
    handle = await actor.submit(ask(max_tokens=4000))
    runner = actor.runner
    assert isinstance(runner, ProcessRunner)
    first = runner.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ReplicaLostError):
        await handle.result()
    await until(lambda: actor.generation == 2)
    assert runner.pid != first
    assert len((await (await actor.submit(ask())).result()).token_ids) == 4
    await actor.drain(10.0)
    assert actor.state is ReplicaState.STOPPED


@pytest.mark.slow
async def test_a_process_that_hangs_is_killed() -> None:
    config = LocalEngineConfig(probe_interval=0.05, max_silence=0.5, restart_pause=0.01)
    actor = EngineCoreActor(ProcessRunner(spec(step_seconds=0.01)), config, text=NoText())
    await actor.start()
    handle = await actor.submit(ask(max_tokens=4000))
    runner = actor.runner
    assert isinstance(runner, ProcessRunner)
    assert runner.pid is not None
    os.kill(runner.pid, signal.SIGSTOP)
    with pytest.raises(ReplicaLostError, match="not answered"):
        await handle.result()
    await until(lambda: actor.generation == 2)
    await actor.drain(10.0)


async def test_what_cannot_be_loaded_says_why_and_leaves_no_process() -> None:
    for factory, kind, words in (
        ("broken", CheckpointError, "cut short"),
        ("bugged", ReplicaError, "a mistake"),
        ("missing", ReplicaError, "missing"),
        ("deadly", ReplicaLostError, "process"),
    ):
        runner = ProcessRunner(spec(factory))
        with pytest.raises(kind, match=words):
            await runner.start()
        assert runner.pid is None
        with pytest.raises(SubmitError):
            runner.card  # noqa: B018
    with pytest.raises(ConfigError):
        ChildSpec(factory="nowhere")


async def test_one_that_loads_for_ever_is_killed() -> None:
    runner = ProcessRunner(spec("endless"))
    config = LocalEngineConfig(max_loading=1000.0, max_restarts=0)
    actor = EngineCoreActor(runner, config, text=NoText())
    starting = asyncio.ensure_future(actor.start())
    await until(lambda: runner.pid is not None)
    pid = runner.pid
    assert pid is not None
    hurry(2000.0)
    with pytest.raises(LoadTimeoutError, match="1000 s"):
        await starting
    assert gone(pid)
    assert runner.pid is None
    await actor.drain(0)


async def test_stopped_while_it_starts_no_process_is_left() -> None:
    runner = ProcessRunner(spec())
    starting = asyncio.ensure_future(runner.start())
    await until(lambda: runner.pid is not None)
    pid = runner.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert pid is not None
    assert gone(pid)


async def test_it_has_the_environment_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPPE_TEST_NAME", "of the parent")

    async def name_in(**environment: str) -> str:
        factory = f"{FACTORY}:named_by"
        options = {"variable": "STEPPE_TEST_NAME"}
        runner = ProcessRunner(ChildSpec(factory=factory, options=options, environment=environment))
        await runner.start()
        await runner.close()
        return runner.card.name

    assert await name_in() == "of the parent"
    assert await name_in(CUDA_VISIBLE_DEVICES="1") == "of the parent"
    assert await name_in(STEPPE_TEST_NAME="its own") == "its own"
    assert os.environ["STEPPE_TEST_NAME"] == "of the parent"
    for wrong in ({"": "x"}, {"a=b": "x"}, {"a": "\0"}):
        with pytest.raises(ConfigError) as refused:
            ChildSpec(environment=wrong)
        assert refused.value.field == "environment"


async def test_signals_to_the_group_do_not_end_it() -> None:
    async with started() as runner:
        assert runner.pid is not None
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(runner.pid, sig)
        assert (await runner.status()).health.ok


PARENT = """
import asyncio
from steppe.replicas.runners.process import ChildSpec, ProcessRunner

async def main():
    runner = ProcessRunner(ChildSpec(factory="tests.replicas.engines:scripted"))
    await runner.start()
    print(runner.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_it_dies_with_its_parent() -> None:
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        assert not gone(pid)
        parent.kill()
        await until(lambda: gone(pid))


class ChildInTheSameLoop:
    """A child's side of the socket in this process, and the wire in the test's hands."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.ended: list[str] = []
        self.child_ended: list[int] = []
        self.wire = FrameProtocol(self.heard.append, self.ended.append)
        self.child = Child(lambda: self.child_ended.append(1))

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for sock, protocol in ((ours, self.wire), (theirs, self.child.frames)):
            sock.setblocking(False)
            await loop.create_unix_connection(lambda protocol=protocol: protocol, sock=sock)

    async def say(self, *message: Any) -> Any:
        """Send a message, and wait for what comes next."""
        count = len(self.heard)
        self.wire.send(list(message))
        await until(lambda: len(self.heard) > count or bool(self.child_ended))
        return self.heard[-1] if self.heard else None


async def test_a_child_answers_nonsense_with_an_error_or_hangs_up() -> None:
    peer = ChildInTheSameLoop()
    await peer.connect()
    kind, number, error, _ = await peer.say("ask", 1, "load", f"{FACTORY}:broken", {}, None)
    assert (kind, number, error["kind"]) == ("answer", 1, "CheckpointError")
    cores = sorted(os.sched_getaffinity(0))
    _, _, error, card = await peer.say("ask", 2, "load", f"{FACTORY}:scripted", {}, cores)
    assert error is None
    assert card["name"] == "scripted"
    _, _, error, _ = await peer.say("ask", 3, "sing")
    assert "sing" in error["message"]
    kind, number, error = await peer.say("execute", 9, {"prompt": [1], "params": {"n": 0}})
    assert (kind, number, error["kind"]) == ("end", 9, "InvalidRequestError")
    kind, number, error = await peer.say("execute", 10, 77)
    assert (kind, error["kind"]) == ("end", "ReplicaError")
    peer.wire.send(["cancel", 12345])
    assert (await peer.say("ask", 4, "status"))[2] is None
    await peer.say("sing", 5)
    assert peer.child_ended == [1]
    await until(lambda: bool(peer.ended))
    runner = peer.child._runner
    assert runner is not None
    await runner.close()


@pytest.mark.slow
async def test_a_parent_that_does_not_read_makes_a_child_merge() -> None:
    """What waits in the socket is bounded, and what waits behind it is one chunk a sequence."""
    peer = ChildInTheSameLoop()
    await peer.connect()
    await peer.say("ask", 1, "load", f"{FACTORY}:scripted", {}, None)
    transport = peer.wire._transport
    assert transport is not None
    transport.pause_reading()
    for number in range(8):
        request = {"prompt": [1], "params": {"max_tokens": 4000, "logprobs": 5}}
        peer.wire.send(["execute", 100 + number, request])
    runner = peer.child._runner
    assert runner is not None
    engine = runner.client
    await until(lambda: not peer.child.frames._writable.is_set())
    while (await engine.metrics()).completed < 8:  # noqa: ASYNC110 - in another thread
        await asyncio.sleep(0.001)
    await settle()
    assert len(peer.child._tasks) > 0, "they wait for the reader"
    transport.resume_reading()
    await until(lambda: sum(one[0] == "end" for one in peer.heard) == 8)
    chunks = [one for one in peer.heard if one[0] == "chunk"]
    for number in range(8):
        tokens = [token for one in chunks if one[1] == 100 + number for token in one[4]]
        assert len(tokens) == 4000
    assert len(chunks) < 8 * 4000
    peer.wire.abort("the end of the test")
    await until(lambda: bool(peer.child_ended))
    await runner.close()


async def test_an_unreadable_child_is_lost() -> None:
    async with started() as runner:
        child = runner._peer
        assert child is not None
        child.frames.data_received(b"\x00\x00\x00\x02{}")
        assert "cannot be read" in str(await runner.lost())
        with pytest.raises(ReplicaLostError):
            await runner.execute(batch(1))


async def test_errors_that_are_not_about_replicas_keep_their_kind() -> None:
    async with started(max_pending=1) as runner:
        stream = await runner.execute(batch(1, max_tokens=4000))
        with pytest.raises(SubmitError) as refused:
            await collect(runner, batch(2))
        assert refused.value.reason == "backlog_full"
        await stream.aclose()
        with pytest.raises((InvalidRequestError, RequestCancelledError)):
            await collect(runner, batch(3, n=9))
