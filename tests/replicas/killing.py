"""A load over several engines in processes of their own, which are killed one after another."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from steppe.errors import ReplicaLostError
from steppe.replicas.coordinator import DpCoordinator
from steppe.replicas.engine_core import EngineCoreActor
from steppe.replicas.messages import LocalEngineConfig
from steppe.replicas.runner import ModelRunner
from steppe.replicas.vocabulary import ReplicaState
from tests.replicas.helpers import NoText, ask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.replicas.handle import ReplicaHandle

PATIENCE = 60.0


class Killable(ModelRunner, Protocol):
    """A runner whose engine is a process of this machine."""

    @property
    def pid(self) -> int | None:
        """That process."""


async def kill_under_load(runners: Sequence[Killable], *, requests: int, pause: float) -> None:
    """For as long as a load lasts, kill one of them every ``pause`` seconds: requests without a
    chunk finish elsewhere, the others get one error each, and all come back.
    """
    actors = [
        EngineCoreActor(
            runner,
            LocalEngineConfig(max_concurrent=64, max_restarts=20, restart_pause=0.05),
            text=NoText(),
            name=str(number),
        )
        for number, runner in enumerate(runners)
    ]
    coordinator = DpCoordinator(actors, text=NoText())
    await coordinator.start()
    outcomes: Counter[str] = Counter()

    async def one(handle: ReplicaHandle) -> None:
        chunks = 0
        try:
            async for chunk in handle:
                chunks += 1
                last = chunk
            assert last.usage is not None
            outcomes["completed"] += 1
        except ReplicaLostError:
            assert chunks, "a request without a chunk should have finished elsewhere"
            outcomes["lost"] += 1
        assert handle.ready

    async def load() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(requests):
                handle = await coordinator.submit(ask(max_tokens=40))
                group.create_task(one(handle))
                await asyncio.sleep(0.02)

    rng = random.Random(3)
    loading = asyncio.ensure_future(load())
    kills = 0
    while not loading.done():
        await asyncio.wait([loading], timeout=pause)
        ready = [i for i, actor in enumerate(actors) if actor.state is ReplicaState.READY]
        if len(ready) > 1 and not loading.done():
            pid = runners[rng.choice(ready)].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            kills += 1
    await loading
    assert kills >= 2
    assert outcomes.total() == requests
    assert outcomes["completed"] > requests // 2
    assert outcomes["lost"] == coordinator.account.failed
    assert coordinator.account.completed == outcomes["completed"]
    async with asyncio.timeout(PATIENCE):
        while not all(one.in_rotation for one in coordinator.replicas()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert sum(one.generation for one in actors) == len(actors) + kills
    assert all(one.in_flight == 0 for one in actors)
    await coordinator.drain(5.0)
