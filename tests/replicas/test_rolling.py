"""Every replica gets a successor, one after the other, under load: no request is lost."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.errors import ModelNotFoundError
from steppe.replicas.coordinator import DpCoordinator
from steppe.replicas.engine_core import EngineCoreActor
from steppe.replicas.messages import LocalEngineConfig
from steppe.replicas.rolling import RollingReplacement, next_name
from steppe.replicas.runners.scripted import Play, ScriptedRunner
from steppe.replicas.vocabulary import ReplicaState
from steppe.testing import VirtualLoop, virtually
from tests.replicas.helpers import NoText, ask, check_idle, settle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PLAY = Play(tokens=5, first=0.2, between=0.3)


class Fleet:
    """Replicas, and the successors that were made."""

    def __init__(self, count: int, make: Callable[[], ScriptedRunner], ours: int) -> None:
        config = LocalEngineConfig(max_concurrent=16, max_restarts=0)
        self.first = [
            EngineCoreActor(ScriptedRunner(PLAY), config, text=NoText(), name=str(number))
            for number in range(count)
        ]
        self.made: list[EngineCoreActor] = []
        self.coordinator = DpCoordinator(self.first, text=NoText())
        self.rolling = RollingReplacement(self.coordinator, self._successor)
        self._make = make
        self._ours = {one.name for one in self.first[:ours]}

    def _successor(self, old: EngineCoreActor, name: str) -> EngineCoreActor | None:
        if old.name.partition(".")[0] not in self._ours:
            return None
        self.made.append(old.successor(self._make(), name))
        return self.made[-1]

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.coordinator.replicas()]


@asynccontextmanager
async def fleet(
    count: int = 3, make: Callable[[], ScriptedRunner] | None = None, ours: int | None = None
) -> AsyncIterator[Fleet]:
    """A fleet that is ready; everything must be given back in the end, also by successors."""
    one = Fleet(
        count,
        make or (lambda: ScriptedRunner(PLAY, start_seconds=0.5)),
        count if ours is None else ours,
    )
    await one.coordinator.start()
    yield one
    await one.rolling.stop()
    await one.coordinator.drain(0.0)
    await settle()
    for actor in (*one.first, *one.made):
        check_idle(actor)
        assert actor.state is ReplicaState.STOPPED


async def load(coordinator: DpCoordinator, count: int, every: float) -> list[Any]:
    """So many requests, one after the other, and their answers."""
    answers = []
    for _ in range(count):
        handle = await coordinator.submit(ask())
        answers.append(asyncio.ensure_future(handle.result()))
        await asyncio.sleep(every)
    return await asyncio.gather(*answers)


@settings(max_examples=20)
@given(
    count=st.integers(1, 4),
    every=st.sampled_from([0.03, 0.1, 0.4]),
    asked=st.lists(st.floats(0.0, 6.0), min_size=1, max_size=3),
)
def test_nothing_is_lost_however_often_it_is_asked_for(
    count: int, every: float, asked: list[float]
) -> None:
    async def main(loop: VirtualLoop) -> None:
        async with fleet(count) as one:
            for when in asked:
                loop.call_later(when, one.rolling.begin)
            requests = min(12 * count, 40)
            answers = await load(one.coordinator, requests, every)
            await asyncio.sleep(10.0)
            await one.rolling.finished()
            assert len(answers) == requests
            assert all(len(answer.token_ids) == 5 for answer in answers)
            metrics = await one.coordinator.metrics()
            assert (metrics.completed, metrics.failed, metrics.cancelled) == (requests, 0, 0)
            assert 1 <= len(one.made) // count <= len(asked)
            assert len(one.made) % count == 0
            assert len(one.names) == count
            assert all(old.state is ReplicaState.STOPPED for old in one.first)

    virtually(main)


def test_one_at_a_time_and_each_when_its_successor_is_ready() -> None:
    async def main(_: VirtualLoop) -> None:
        async with fleet(2) as one:
            one.rolling.begin()
            await asyncio.sleep(0.4)
            assert one.names == ["0", "1"], "the successor is loading"
            await asyncio.sleep(0.2)
            assert one.names == ["1", "0.2"]
            assert len(one.made) == 2
            assert one.made[1].state is ReplicaState.LOADING
            one.rolling.begin()
            one.rolling.begin()
            await one.rolling.finished()
            assert one.names == ["0.3", "1.3"], "asked twice meanwhile, and one round came of it"

    virtually(main)


def test_an_answer_under_way_is_finished_where_it_began() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with fleet(1) as one:
            handle = await one.coordinator.submit(ask())
            runner = one.first[0].runner
            assert isinstance(runner, ScriptedRunner)
            runner.freeze()
            one.rolling.begin()
            await asyncio.sleep(5.0)
            assert one.first[0].state is ReplicaState.DRAINING
            other = await one.coordinator.submit(ask())
            await other.result()
            runner.thaw()
            assert len((await handle.result()).token_ids) == 5
            await one.rolling.finished()
            assert one.names == ["0.2"]

    virtually(main)


def test_a_successor_that_does_not_start_ends_the_round(caplog: pytest.LogCaptureFixture) -> None:
    async def main(_: VirtualLoop) -> None:
        errors = [[], [ModelNotFoundError("nowhere")], []]

        def make() -> ScriptedRunner:
            return ScriptedRunner(PLAY, start_errors=list(errors.pop(0)))  # type: ignore[call-overload]

        async with fleet(3, make) as one:
            one.rolling.begin()
            await one.rolling.finished()
            assert one.names == ["1", "2", "0.2"]
            assert "nowhere" in caplog.text
            assert len(await load(one.coordinator, 9, 0.01)) == 9
            assert one.made[1].state is ReplicaState.STOPPED

    virtually(main)


def test_one_that_has_failed_comes_back() -> None:
    async def main(_: VirtualLoop) -> None:
        async with fleet(1) as one:
            runner = one.first[0].runner
            assert isinstance(runner, ScriptedRunner)
            runner.crash()
            await settle()
            assert not one.coordinator.accepting
            one.rolling.begin()
            await one.rolling.finished()
            assert one.coordinator.accepting
            assert len(await load(one.coordinator, 3, 0.1)) == 3

    virtually(main)


def test_those_that_are_not_ours_stay() -> None:
    async def main(_: VirtualLoop) -> None:
        async with fleet(3, ours=2) as one:
            one.rolling.begin()
            await one.rolling.finished()
            assert one.names == ["2", "0.2", "1.2"]

    virtually(main)


@pytest.mark.parametrize("moment", [0.2, 0.7, 3.0])
@pytest.mark.parametrize("how", ["stop", "drain"])
def test_an_end_in_the_middle_leaves_nothing(moment: float, how: str) -> None:
    """While the first successor loads, while its predecessor drains, and after that."""

    async def main(_: VirtualLoop) -> None:
        async with fleet(2) as one:
            handles = [await one.coordinator.submit(ask()) for _ in range(4)]
            one.rolling.begin()
            await asyncio.sleep(moment)
            if how == "drain":
                ending = asyncio.ensure_future(one.coordinator.drain(60.0))
                await settle()
                one.rolling.begin()
                await ending
            await one.rolling.stop()
            for handle in handles:
                assert len((await handle.result()).token_ids) == 5

    virtually(main)


def test_names_of_successors() -> None:
    assert [next_name(name) for name in ("0", "0.2", "r7.11")] == ["0.2", "0.3", "r7.12"]
