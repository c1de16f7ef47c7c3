"""P17, P18 behind a coordinator: a replica whose process dies takes no more work, whoever waited
for it hears of it or is served elsewhere, and when the last is dead the server says so.
"""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from steppe.errors import ReplicaLostError, SubmitError
from steppe.replicas.coordinator import DpCoordinator
from steppe.replicas.engine_core import EngineCoreActor
from steppe.replicas.messages import LocalEngineConfig
from steppe.replicas.rotation import CoordinatorConfig
from steppe.replicas.runners.scripted import Play, ScriptedRunner
from steppe.testing import VirtualLoop, virtually
from tests.replicas.helpers import NoText, ask, settle


def test_dead_engines_are_noticed_and_nobody_waits_for_them() -> None:
    async def main(loop: VirtualLoop) -> None:
        runners = [ScriptedRunner(Play(tokens=5, between=1.0)) for _ in range(2)]
        actors = [
            EngineCoreActor(
                runner, LocalEngineConfig(max_restarts=0), text=NoText(), name=str(number)
            )
            for number, runner in enumerate(runners)
        ]
        coordinator = DpCoordinator(
            actors, text=NoText(), rng=Random(1), config=CoordinatorConfig(patience=2.0)
        )
        await coordinator.start()
        begun = [await coordinator.submit(ask()) for _ in range(4)]
        reading = [asyncio.ensure_future(handle.result()) for handle in begun]
        await asyncio.sleep(0.5)

        runners[0].crash()
        await settle()
        lost = [task for task in reading if task.done()]
        assert len(lost) == 2, "at once, and only those that it ran"
        for task in lost:
            with pytest.raises(ReplicaLostError):
                task.result()
        for _ in range(3):
            await coordinator.submit(ask())
        assert len(runners[0].seen) == 2, "it is asked no more"
        assert (await coordinator.health()).ok

        when = loop.time()
        runners[1].crash()
        await asyncio.wait(reading)
        assert loop.time() == when
        assert all(isinstance(task.exception(), ReplicaLostError) for task in reading)
        with pytest.raises(SubmitError):
            await coordinator.submit(ask())
        health = await coordinator.health()
        assert (health.ok, health.state) == (False, "failed")
        assert health.cause is not None
        assert "crashed" in health.cause
        await coordinator.drain(0)

    virtually(main)
