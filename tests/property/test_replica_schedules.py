"""Random schedules over replicas (spec 8.6, check 11): whatever callers do and whatever runners
suffer, every request has one end, every place comes back, and the accounts add up at every instant.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.errors import ReplicaLostError, RequestFailedError, SteppeError, SubmitError
from steppe.replicas.coordinator import DpCoordinator
from steppe.replicas.engine_core import EngineCoreActor
from steppe.replicas.messages import LocalEngineConfig
from steppe.replicas.policies import POLICIES, policy_named
from steppe.replicas.rotation import CoordinatorConfig
from steppe.replicas.runners.scripted import Play, ScriptedRunner
from steppe.replicas.vocabulary import ReplicaState
from steppe.testing import VirtualLoop, virtually
from tests.replicas.helpers import NoText, ask, check_account, check_idle, settle

if TYPE_CHECKING:
    from steppe.replicas.handle import ReplicaHandle
    from steppe.replicas.vocabulary import ExecuteBatch

PLAYS = st.builds(
    Play,
    tokens=st.integers(0, 4),
    first=st.sampled_from([0.0, 0.5, 3.0]),
    between=st.sampled_from([0.0, 0.3]),
    delay=st.sampled_from([0.0, 0.0, 0.4]),
    ending=st.sampled_from(["stop", "stop", "stop", "raise", "silence", "babble", "hang"]),
    error=st.sampled_from([None, RequestFailedError("a step failed"), ValueError("a bug")]),
    refuse=st.sampled_from([None] * 6 + [SubmitError("queue_full", "scripted")]),
)
REPLICAS = 3
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), PLAYS),
    st.tuples(st.just("submit"), PLAYS),
    st.tuples(st.just("read"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("drop"), st.integers(0, 9)),
    st.tuples(st.just("crash"), st.integers(0, REPLICAS - 1)),
    st.tuples(st.just("freeze"), st.integers(0, REPLICAS - 1)),
    st.tuples(st.just("thaw"), st.integers(0, REPLICAS - 1)),
    st.tuples(st.just("replace"), st.integers(0, REPLICAS - 1)),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.1, 1.0, 8.0])),
)


class Schedule:
    """A fleet, its callers, and the books of both."""

    def __init__(self, policy: str, places: int, seed: int) -> None:
        self.plays: dict[int, Play] = {}
        self.play = Play()
        self.policy = policy
        self.places = places
        self.seed = seed
        self.names = 0
        self.runners: list[ScriptedRunner] = []
        self.actors: list[EngineCoreActor] = []
        self.handles: list[ReplicaHandle] = []
        self.reading: list[asyncio.Task[Any]] = []
        self.replacing: list[asyncio.Task[None]] = []
        self.ends: Counter[str] = Counter()

    def make(self) -> EngineCoreActor:
        runner = ScriptedRunner(self.play_of, seats=2, start_seconds=0.2)
        config = LocalEngineConfig(
            max_concurrent=self.places, max_restarts=50, probe_interval=0.3, max_silence=4.0
        )
        actor = EngineCoreActor(runner, config, text=NoText(), name=f"r{self.names}")
        self.names += 1
        self.runners.append(runner)
        self.actors.append(actor)
        return actor

    def play_of(self, batch: ExecuteBatch) -> Play:
        return self.plays.setdefault(batch.request_id, self.play)

    async def run(self, actions: list[tuple[str, Any]]) -> None:
        self.coordinator = DpCoordinator(
            [self.make() for _ in range(REPLICAS)],
            text=NoText(),
            policy=policy_named(self.policy),
            config=CoordinatorConfig(patience=5.0),
            rng=Random(self.seed),
        )
        await self.coordinator.start()
        for action, detail in actions:
            await getattr(self, action)(detail)
            await settle(5)
            self.check()
        for runner in self.runners:
            runner.thaw()
        await asyncio.wait_for(self.coordinator.drain(20.0), 200.0)
        await asyncio.wait_for(asyncio.gather(*self.reading, *self.replacing), 200.0)
        self.finish()

    # ---- what happens ----------------------------------------------------------------------------

    async def submit(self, play: Play) -> None:
        self.play = play
        try:
            async with asyncio.timeout(1.0):
                self.handles.append(await self.coordinator.submit(ask()))
        except (SteppeError, TimeoutError) as error:
            self.ends[type(error).__name__] += 1

    async def read(self, which: int) -> None:
        if self.handles:
            handle = self.handles.pop(which % len(self.handles))
            self.reading.append(asyncio.ensure_future(self.reader(handle)))

    async def reader(self, handle: ReplicaHandle) -> None:
        """Read to the one end; nothing may come after it."""
        last = None
        try:
            async for chunk in handle:
                assert last is None or last.usage is None, "something came after the end"
                last = chunk
            assert last is not None
            assert last.usage is not None, "an end without an end"
            whole = await handle.result()
            assert len(whole.token_ids) == whole.usage.completion_tokens
        except SteppeError as error:
            assert last is None or last.usage is None, "an error after the end"
            try:
                await handle.result()
            except type(error):
                return
            raise AssertionError("two different ends") from error

    async def cancel(self, which: int) -> None:
        if self.handles:
            self.handles[which % len(self.handles)].cancel()

    async def drop(self, which: int) -> None:
        if self.handles:
            del self.handles[which % len(self.handles)]

    async def crash(self, which: int) -> None:
        runner = self.runners[-1 - which]
        if runner.starts:
            runner.crash(ReplicaLostError("as scheduled"))

    async def freeze(self, which: int) -> None:
        self.runners[-1 - which].freeze()

    async def thaw(self, which: int) -> None:
        self.runners[-1 - which].thaw()

    async def replace(self, which: int) -> None:
        names = [one.name for one in self.coordinator.replicas()]
        self.replacing.append(asyncio.ensure_future(self.replacer(names[which], self.make())))

    async def replacer(self, name: str, successor: EngineCoreActor) -> None:
        try:
            await self.coordinator.replace(name, successor, patience=10.0)
        except SubmitError:
            assert not self.coordinator.accepting, "nothing else is in its way"
            assert successor.state is ReplicaState.STOPPED

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    # ---- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        for actor in self.actors:
            check_account(actor)
        account = self.coordinator.account
        assert account.submitted == account.ended + account.live

    def finish(self) -> None:
        self.check()
        assert self.coordinator.account.live == 0
        for actor in self.actors:
            check_idle(actor)


@settings(max_examples=int(os.environ.get("STEPPE_EXAMPLES", "60")), deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=30),
    policy=st.sampled_from(sorted(POLICIES)),
    places=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_whatever_happens_every_request_ends_once_and_everything_comes_back(
    actions: list[tuple[str, Any]], policy: str, places: int, seed: int
) -> None:
    async def main(_: VirtualLoop) -> None:
        await Schedule(policy, places, seed).run(actions)

    virtually(main)
