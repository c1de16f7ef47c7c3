"""P23 behind a coordinator: a reader that takes nothing costs what its own answer weighs, in a
bounded number of pieces, and no other reader waits.
"""

from __future__ import annotations

import asyncio

from steppe.replicas.coordinator import DpCoordinator
from steppe.replicas.engine_core import EngineCoreActor
from steppe.replicas.output import CAPACITY
from steppe.replicas.runners.scripted import Play, ScriptedRunner
from steppe.testing import VirtualLoop, virtually
from tests.replicas.helpers import NoText, ask


def test_a_reader_that_stops_holds_a_bounded_number_of_chunks() -> None:
    async def main(loop: VirtualLoop) -> None:
        actor = EngineCoreActor(ScriptedRunner(Play(tokens=3000, between=0.01)), text=NoText())
        coordinator = DpCoordinator([actor], text=NoText())
        await coordinator.start()
        stalled = await coordinator.submit(ask())
        other = await coordinator.submit(ask())
        chunks = aiter(stalled)
        await anext(chunks)
        assert len((await other.result()).token_ids) == 3000
        assert loop.time() < 31
        rest = [chunk async for chunk in chunks]
        assert len(rest) <= CAPACITY + 2
        assert sum(len(chunk.token_ids) for chunk in rest) == 2999
        await asyncio.wait_for(coordinator.drain(None), 5.0)

    virtually(main)
