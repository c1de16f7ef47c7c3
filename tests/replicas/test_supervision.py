"""A runner that is lost is started again, but not for ever; one that hangs is lost."""

from __future__ import annotations

import asyncio

import pytest

from steppe.errors import (
    EngineFailedError,
    LoadTimeoutError,
    ModelNotFoundError,
    NetworkError,
    ReplicaLostError,
    SubmitError,
)
from steppe.replicas.engine_core import EngineCoreActor
from steppe.replicas.messages import LocalEngineConfig
from steppe.replicas.runners.scripted import Play, ScriptedRunner
from steppe.replicas.supervision import RestartBudget
from steppe.replicas.vocabulary import ReplicaState
from steppe.stepping.cache_metrics import ContextCacheMetrics
from steppe.testing import VirtualLoop, virtually
from tests.replicas.helpers import NoText, ask, load_of, replica, settle


def test_restarts_are_few_in_a_window_and_ever_later_within_it() -> None:
    budget = RestartBudget(3, 60.0, 0.5)
    assert [budget.take(now) for now in (0.0, 1.0, 2.0)] == [0.5, 1.0, 2.0]
    assert budget.take(3.0) is None
    assert budget.take(60.0) is None, "the first one took place at 0.5"
    assert budget.take(61.0) == 2.0
    assert RestartBudget(0, 60.0, 0.5).take(0.0) is None
    patient = RestartBudget(20, 1e9, 0.5)
    assert [patient.take(0.0) for _ in range(8)][-1] == 30.0


def test_a_replica_that_is_lost_too_often_has_failed() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with replica(max_restarts=2, restart_pause=1.0) as (actor, runner):
            for starts in (2, 3):
                runner.crash()
                await settle()
                assert actor.state is ReplicaState.LOADING
                assert (await actor.health()).state == "loading"
                assert actor.accepting
                await actor.start()
                assert runner.starts == starts
            assert loop.time() == pytest.approx(3.0)
            runner.crash()
            await settle()
            assert actor.state is ReplicaState.FAILED
            assert not actor.accepting
            with pytest.raises(EngineFailedError, match="crashed"):
                await actor.submit(ask())
            with pytest.raises(EngineFailedError):
                await load_of(actor)
            health = await actor.health()
            assert (health.state, health.ok) == ("failed", False)
            assert health.cause
            assert runner.starts == 3

    virtually(main)


def test_a_start_that_cannot_help_is_not_repeated_and_one_that_may_is() -> None:
    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(start_errors=[ModelNotFoundError("no such model")])
        actor = EngineCoreActor(runner, text=NoText())
        with pytest.raises(ModelNotFoundError):
            await actor.start()
        assert actor.state is ReplicaState.FAILED
        assert runner.starts == 1
        await actor.drain(0)

        runner = ScriptedRunner(start_errors=[NetworkError("not yet"), OSError("nor now")])
        actor = EngineCoreActor(runner, text=NoText())
        await actor.start()
        assert (runner.starts, actor.generation) == (3, 1)
        await actor.drain(0)

    virtually(main)


def test_one_that_takes_too_long_to_load_is_lost_and_restarts_are_as_few() -> None:
    async def main(loop: VirtualLoop) -> None:
        runner = ScriptedRunner(start_seconds=100.0)
        config = LocalEngineConfig(max_loading=10.0, max_restarts=2, restart_pause=1.0)
        actor = EngineCoreActor(runner, config, text=NoText())
        with pytest.raises(LoadTimeoutError, match="not loaded within 10 s"):
            await actor.start()
        assert (runner.starts, actor.generation, actor.state) == (3, 0, ReplicaState.FAILED)
        assert loop.time() == pytest.approx(10.0 + 1.0 + 10.0 + 2.0 + 10.0)
        await actor.drain(0)

        # In time at the second try, it is as any other.
        runner = ScriptedRunner(start_seconds=100.0)
        actor = EngineCoreActor(runner, config, text=NoText())
        starting = asyncio.ensure_future(actor.start())
        await asyncio.sleep(10.5)
        assert isinstance(actor.cause, LoadTimeoutError)
        assert actor.accepting
        runner.start_seconds = 9.0
        await starting
        assert (runner.starts, actor.generation) == (2, 1)
        assert await load_of(actor) == 0.0
        await actor.drain(0)

        # What a start itself raises is not taken for its limit.
        runner = ScriptedRunner(start_errors=[TimeoutError("a disk of its own")])
        actor = EngineCoreActor(runner, LocalEngineConfig(max_restarts=0), text=NoText())
        with pytest.raises(TimeoutError, match="a disk of its own"):
            await actor.start()
        await actor.drain(0)

    virtually(main)


def test_while_it_loads_it_refuses_and_can_be_stopped() -> None:
    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(start_seconds=100.0)
        actor = EngineCoreActor(runner, text=NoText())
        starting = asyncio.ensure_future(actor.start())
        await settle()
        with pytest.raises(SubmitError) as refused:
            await actor.submit(ask())
        assert refused.value.reason == "unavailable"
        await actor.drain(None)
        await starting
        assert actor.state is ReplicaState.STOPPED

    virtually(main)


def test_a_runner_that_hangs_stops_answering_polls_and_is_lost_in_the_end() -> None:
    async def main(loop: VirtualLoop) -> None:
        play = Play(tokens=1000, between=0.5)
        async with replica(ScriptedRunner(play), probe_interval=1.0, max_silence=10.0) as (
            actor,
            runner,
        ):
            handle = await actor.submit(ask())
            await asyncio.sleep(2.6)
            assert await load_of(actor) > 0
            runner.freeze()
            await asyncio.sleep(3.0)
            with pytest.raises(SubmitError, match="has not answered"):
                await load_of(actor)
            health = await actor.health()
            assert (health.ok, health.state) == (False, "stalled")
            assert (await actor.metrics()).submitted == 1, "known without asking"
            with pytest.raises(ReplicaLostError, match="not answered for 10 s"):
                await handle.result()
            assert loop.time() == pytest.approx(13.0, abs=0.2)
            await actor.start()
            assert actor.generation == 2
            assert await load_of(actor) == 0.0

    virtually(main)


def test_a_runner_that_thaws_in_time_is_not_lost() -> None:
    async def main(_: VirtualLoop) -> None:
        async with replica(max_silence=10.0) as (actor, runner):
            runner.freeze()
            await asyncio.sleep(8.0)
            runner.thaw()
            await settle()
            assert await load_of(actor) == 0.0
            assert actor.generation == 1

    virtually(main)


def test_counters_of_engines_that_are_gone_still_count() -> None:
    async def main(_: VirtualLoop) -> None:
        async with replica(ScriptedRunner(Play(tokens=3))) as (actor, runner):
            for total in (3, 6):
                await (await actor.submit(ask())).result()
                await asyncio.sleep(1.5)
                metrics = await actor.metrics()
                assert (metrics.tokens, metrics.completed) == (total, total // 3)
                runner.crash()
                await settle()
                assert (await actor.metrics()).tokens == total
                await actor.start()

    virtually(main)


def test_of_caches_that_are_gone_what_happened_counts_and_no_pages() -> None:
    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(cache=ContextCacheMetrics(reused_tokens=5, cached_pages=3))
        async with replica(runner) as (actor, _):
            assert await actor.context_cache_metrics() == runner.cache, "known from the start"
            runner.cache = ContextCacheMetrics(reused_tokens=8, cached_pages=2)
            assert (await actor.context_cache_metrics()) != runner.cache
            await asyncio.sleep(1.5)
            assert await actor.context_cache_metrics() == runner.cache, "asked with every probe"
            runner.crash()
            await settle()
            assert await actor.context_cache_metrics() == ContextCacheMetrics(reused_tokens=8)
            runner.cache = ContextCacheMetrics(reused_tokens=1, cached_pages=4)
            await actor.start()
            both = ContextCacheMetrics(reused_tokens=9, cached_pages=4)
            assert actor.report(in_rotation=True).cache == both
            # One that does not tell any more takes nothing back.
            runner.crash()
            await settle()
            runner.cache = None
            await actor.start()
            assert await actor.context_cache_metrics() == ContextCacheMetrics(reused_tokens=9)

    virtually(main)


def test_a_runner_lost_while_it_drains_is_not_started_again() -> None:
    async def main(_: VirtualLoop) -> None:
        async with replica(ScriptedRunner(Play(ending="hang"))) as (actor, runner):
            handle = await actor.submit(ask())
            draining = asyncio.ensure_future(actor.drain(None))
            await settle()
            runner.crash()
            with pytest.raises(ReplicaLostError):
                await handle.result()
            await draining
            assert runner.starts == 1
            assert actor.state is ReplicaState.STOPPED

    virtually(main)


def test_what_it_is_doing_is_asked_of_the_runner_and_not_waited_for() -> None:
    class Slow(ScriptedRunner):
        async def activity(self, after: int = 0):  # type: ignore[no-untyped-def]
            await asyncio.sleep(50.0)

    async def main(loop: VirtualLoop) -> None:
        async with replica(Slow()) as (actor, _):
            found = await actor.activity()
            assert (found.steps, found.live) == ((), ())
            assert loop.time() == pytest.approx(1.0)

    virtually(main)


def test_the_settings_are_the_seeds() -> None:
    config = LocalEngineConfig()
    assert (config.max_concurrent, config.queue_capacity) == (32, 1024)
    assert (config.max_restarts, config.restart_window) == (3, 60.0)
