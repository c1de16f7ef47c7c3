"""Many replicas: even placement, moves before the first chunk, ejection, replacement (check 6)."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from steppe.errors import (
    BackpressureError,
    ConfigError,
    DeadlineExceededError,
    EngineFailedError,
    InvalidRequestError,
    ModelNotFoundError,
    ReplicaLostError,
    RequestCancelledError,
    RequestFailedError,
    SubmitError,
    UnsupportedRequestError,
)
from steppe.replicas.coordinator import DpCoordinator
from steppe.replicas.engine_core import EngineCoreActor
from steppe.replicas.messages import LocalEngineConfig
from steppe.replicas.policies import POLICIES, RoundRobin, policy_named
from steppe.replicas.rotation import CoordinatorConfig
from steppe.replicas.runners.scripted import Play, ScriptedRunner
from steppe.request import LLMGenerationRequest
from steppe.testing import VirtualLoop, virtually
from tests.replicas.helpers import NoText, ask, check_idle, settle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HANG = Play(ending="hang")
SLOW = Play(tokens=3, first=5.0, between=1.0)


def actor(name: str, runner: ScriptedRunner, **config: Any) -> EngineCoreActor:
    return EngineCoreActor(runner, LocalEngineConfig(**config), text=NoText(), name=name)


@asynccontextmanager
async def fleet(
    *runners: ScriptedRunner, policy: str = "least-loaded", how: Any = None, **config: Any
) -> AsyncIterator[tuple[DpCoordinator, list[EngineCoreActor]]]:
    """A coordinator over replicas that are ready; everything must be given back in the end."""
    actors = [actor(str(number), one, **config) for number, one in enumerate(runners)]
    coordinator = DpCoordinator(
        actors,
        text=NoText(),
        policy=policy_named(policy),
        config=CoordinatorConfig(**(how or {})),
        rng=Random(7),
    )
    await coordinator.start()
    yield coordinator, actors
    await settle()
    account = coordinator.account
    assert account.live == 0
    assert account.submitted == account.ended
    await coordinator.drain(0)
    for one in actors:
        check_idle(one)


def counts(actors: list[EngineCoreActor]) -> list[int]:
    return [one.account.submitted for one in actors]


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_get_equal_shares_also_in_a_burst_between_polls(policy: str) -> None:
    """Check 6: all of these are placed before any poll could tell of them."""

    async def main(loop: VirtualLoop) -> None:
        async with fleet(
            *[ScriptedRunner(HANG) for _ in range(4)], policy=policy, max_concurrent=64
        ) as (coordinator, actors):
            handles = await asyncio.gather(*(coordinator.submit(ask(1)) for _ in range(100)))
            assert loop.time() == 0.0
            most, least = max(counts(actors)), min(counts(actors))
            assert most - least <= (12 if policy == "power-of-two" else 1)
            for handle in handles:
                handle.cancel()

    virtually(main)


def test_work_follows_room_and_not_turns() -> None:
    async def main(_: VirtualLoop) -> None:
        async with fleet(ScriptedRunner(HANG), ScriptedRunner(Play()), max_concurrent=8) as (
            coordinator,
            actors,
        ):
            kept = []
            for _ in range(40):
                handle = await coordinator.submit(ask())
                await settle()
                if handle.ready or actors[1].in_flight == 0:
                    await asyncio.sleep(0.3)
                kept.append(handle)
            assert counts(actors)[1] > 3 * counts(actors)[0]
            for handle in kept:
                handle.cancel()

    virtually(main)


def test_a_lost_replica_passes_on_what_it_had_not_begun_and_no_more() -> None:
    async def main(_: VirtualLoop) -> None:
        first, second = ScriptedRunner(SLOW), ScriptedRunner(Play())
        async with fleet(first, second, policy="round-robin") as (coordinator, actors):
            waiting = await coordinator.submit(ask())
            await (await coordinator.submit(ask())).result()
            assert counts(actors) == [1, 1]
            first.crash()
            answer = await waiting.result()
            assert answer.token_ids == (1, 2, 3, 4), "from the second, under the same id"
            assert counts(actors) == [1, 2]
            account = coordinator.account
            assert (account.submitted, account.completed, account.failed) == (2, 2, 0)

            second.play = Play(tokens=3, between=1.0)
            begun = await coordinator.submit(ask())
            chunks = aiter(begun)
            await anext(chunks)
            second.crash()
            with pytest.raises(ReplicaLostError):
                await anext(chunks)
            assert account.failed == 1
            runs = [one.batch.request_id for one in (*first.seen, *second.seen)]
            assert runs.count(begun.id) == 1

    virtually(main)


def test_a_request_that_kills_replicas_does_not_get_them_all() -> None:
    async def main(_: VirtualLoop) -> None:
        poison = Play(tokens=0, ending="raise", error=ReplicaLostError("it took the process"))
        runners = [ScriptedRunner(poison) for _ in range(5)]
        async with fleet(*runners, how={"max_losses": 1}) as (coordinator, _):
            handle = await coordinator.submit(ask())
            with pytest.raises(ReplicaLostError):
                await handle.result()
            assert sum(len(one.seen) for one in runners) == 2

    virtually(main)


@pytest.mark.parametrize(
    "error",
    [
        RequestFailedError("its own fault"),
        DeadlineExceededError("total", "late"),
        InvalidRequestError("prompt", "is wrong"),
    ],
)
def test_what_would_fail_anywhere_is_not_tried_elsewhere(error: Exception) -> None:
    async def main(_: VirtualLoop) -> None:
        runners = [ScriptedRunner(Play(tokens=0, ending="raise", error=error)) for _ in range(3)]
        async with fleet(*runners) as (coordinator, _):
            handle = await coordinator.submit(ask())
            with pytest.raises(type(error)):
                await handle.result()
            assert sum(len(one.seen) for one in runners) == 1

    virtually(main)


def test_a_full_replica_is_passed_and_when_all_are_full_that_is_said_at_once() -> None:
    async def main(loop: VirtualLoop) -> None:
        runners = [ScriptedRunner(HANG), ScriptedRunner(HANG, limit=1)]
        async with fleet(*runners, policy="round-robin", max_concurrent=2) as (coordinator, actors):
            handles = [await coordinator.submit(ask()) for _ in range(3)]
            assert [one.in_flight for one in actors] == [2, 1]
            with pytest.raises(BackpressureError):
                await coordinator.submit(ask())
            assert loop.time() < 0.01
            assert coordinator.account.refused == 1
            assert (await coordinator.metrics()).refused == 1
            handles[0].cancel()
            await settle()
            handles.append(await coordinator.submit(ask()))
            for handle in handles:
                handle.cancel()

    virtually(main)


def test_an_accepted_request_waits_for_its_only_replica_to_come_back() -> None:
    async def main(loop: VirtualLoop) -> None:
        runner = ScriptedRunner(SLOW, start_seconds=2.0)
        async with fleet(runner, restart_pause=1.0) as (coordinator, _):
            began = loop.time()
            handle = await coordinator.submit(ask())
            runner.crash()
            await settle()
            with pytest.raises(SubmitError) as refused:
                await coordinator.submit(ask())
            assert refused.value.reason == "unavailable"
            runner.play = Play()
            assert len((await handle.result()).token_ids) == 4
            assert 3.0 < loop.time() - began < 5.0

    virtually(main)


def test_it_waits_no_longer_than_patience_and_its_own_time() -> None:
    async def main(loop: VirtualLoop) -> None:
        runner = ScriptedRunner(SLOW)
        async with fleet(runner, restart_pause=20.0, how={"patience": 3.0}) as (coordinator, _):
            patient, hurried = [
                await coordinator.submit(ask(timeout=timeout)) for timeout in (None, 2.0)
            ]
            await asyncio.sleep(0.5)
            runner.crash()
            with pytest.raises(DeadlineExceededError):
                await hurried.result()
            assert loop.time() == pytest.approx(2.0, abs=0.6)
            with pytest.raises(ReplicaLostError):
                await patient.result()
            assert loop.time() == pytest.approx(3.5, abs=1.0)
            await asyncio.sleep(30)

    virtually(main)


def test_moved_it_has_only_what_is_left_of_its_time() -> None:
    async def main(_: VirtualLoop) -> None:
        first, second = ScriptedRunner(SLOW), ScriptedRunner(Play())
        async with fleet(first, second, policy="round-robin") as (coordinator, _):
            handle = await coordinator.submit(ask(timeout=10.0))
            await asyncio.sleep(4.0)
            first.crash()
            await handle.result()
            (moved,) = second.seen
            assert moved.batch.request.timeout == pytest.approx(6.0, abs=0.1)

    virtually(main)


def test_cancelled_on_its_way_it_goes_nowhere() -> None:
    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(SLOW)
        async with fleet(runner, restart_pause=5.0) as (coordinator, _):
            handle = await coordinator.submit(ask())
            runner.crash()
            await asyncio.sleep(1.0)
            coordinator.cancel(handle.id)
            with pytest.raises(RequestCancelledError):
                await handle.result()
            await asyncio.sleep(30.0)
            assert len(runner.seen) == 1
            assert coordinator.account.cancelled == 1
            coordinator.cancel(12345)

            submitting = asyncio.ensure_future(coordinator.submit(ask()))
            submitting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await submitting

    virtually(main)


def test_a_replica_that_hangs_is_ejected_and_comes_back_when_it_answers() -> None:
    async def main(_: VirtualLoop) -> None:
        first, second = ScriptedRunner(Play()), ScriptedRunner(Play())
        async with fleet(
            first, second, policy="round-robin", probe_interval=0.5, max_silence=100.0
        ) as (coordinator, actors):
            await asyncio.sleep(2.0)
            first.freeze()
            await asyncio.sleep(3.0)
            assert [one.in_rotation for one in coordinator.replicas()] == [False, True]
            before = counts(actors)
            for _ in range(6):
                await (await coordinator.submit(ask())).result()
            assert counts(actors) == [before[0], before[1] + 6]
            assert (await coordinator.health()).ok
            first.thaw()
            await asyncio.sleep(1.5)
            assert all(one.in_rotation for one in coordinator.replicas())
            for _ in range(4):
                await (await coordinator.submit(ask())).result()
            assert counts(actors) == [before[0] + 2, before[1] + 8]

    virtually(main)


def test_a_mailbox_that_nobody_empties_is_noticed_too() -> None:
    class Stuck(EngineCoreActor):
        stuck = False

        def _handle_all(self) -> None:
            if not self.stuck:
                super()._handle_all()

    async def main(_: VirtualLoop) -> None:
        stuck = Stuck(ScriptedRunner(), text=NoText(), name="stuck")
        fine = actor("fine", ScriptedRunner())
        coordinator = DpCoordinator([stuck, fine], text=NoText(), policy=RoundRobin())
        await coordinator.start()
        await asyncio.sleep(1.0)
        stuck.stuck = True
        await asyncio.sleep(6.0)
        assert [one.in_rotation for one in coordinator.replicas()] == [False, True]
        for _ in range(4):
            await (await coordinator.submit(ask())).result()
        stuck.stuck = False
        stuck._handle_all()
        await asyncio.sleep(1.5)
        assert all(one.in_rotation for one in coordinator.replicas())
        await coordinator.drain(1.0)

    virtually(main)


def test_replicas_are_replaced_one_by_one_and_no_request_is_lost() -> None:
    async def main(_: VirtualLoop) -> None:
        play = Play(tokens=5, first=0.2, between=0.3)
        runners = [ScriptedRunner(play) for _ in range(3)]
        async with fleet(*runners, max_concurrent=16) as (coordinator, actors):
            answers: list[asyncio.Task[Any]] = []

            async def load() -> None:
                for _ in range(60):
                    handle = await coordinator.submit(ask())
                    answers.append(asyncio.ensure_future(handle.result()))
                    await asyncio.sleep(0.1)

            loading = asyncio.ensure_future(load())
            for old in actors:
                await asyncio.sleep(0.5)
                runner = ScriptedRunner(play, start_seconds=0.5)
                fresh = actor(f"{old.name}+", runner, max_concurrent=16)
                await coordinator.replace(old.name, fresh)
                assert old.in_flight == 0
            await loading
            assert len(await asyncio.gather(*answers)) == 60
            assert [one.name for one in coordinator.replicas()] == ["0+", "1+", "2+"]
            metrics = await coordinator.metrics()
            assert (metrics.completed, metrics.failed, metrics.tokens) == (60, 0, 300)

    virtually(main)


def test_a_successor_that_does_not_start_replaces_nobody() -> None:
    async def main(_: VirtualLoop) -> None:
        async with fleet(ScriptedRunner()) as (coordinator, _):
            bad = actor("bad", ScriptedRunner(start_errors=[ModelNotFoundError("nowhere")]))
            with pytest.raises(ModelNotFoundError):
                await coordinator.replace("0", bad)
            assert [one.name for one in coordinator.replicas()] == ["0"]
            await (await coordinator.submit(ask())).result()

    virtually(main)


def test_names_are_unique_and_unknown_ones_are_ignored() -> None:
    async def main(_: VirtualLoop) -> None:
        async with fleet(ScriptedRunner()) as (coordinator, actors):
            coordinator.register(actors[0])
            assert len(coordinator.replicas()) == 1
            with pytest.raises(ConfigError, match="already"):
                coordinator.register(actor("0", ScriptedRunner()))
            await coordinator.deregister("nobody")
        with pytest.raises(ConfigError, match="one at least"):
            DpCoordinator([], text=NoText())
        for wrong in ({"poll_interval": 0}, {"eject_after": 0}, {"patience": float("nan")}):
            with pytest.raises(ConfigError):
                CoordinatorConfig(**wrong)  # type: ignore[arg-type]

    virtually(main)


def test_it_starts_with_those_that_can_and_fails_when_none_can() -> None:
    async def main(_: VirtualLoop) -> None:
        def broken() -> ScriptedRunner:
            return ScriptedRunner(start_errors=[ModelNotFoundError("nowhere")])

        async with fleet(broken(), ScriptedRunner()) as (coordinator, actors):
            for _ in range(3):
                await (await coordinator.submit(ask())).result()
            assert counts(actors) == [0, 3]
            health = await coordinator.health()
            assert health.ok
            assert health.cause is not None
            assert "nowhere" in health.cause

        coordinator = DpCoordinator([actor("a", broken()), actor("b", broken())], text=NoText())
        with pytest.raises(ModelNotFoundError):
            await coordinator.start()
        assert (await coordinator.health()).state == "failed"
        assert not coordinator.accepting
        await coordinator.drain(0)

    virtually(main)


def test_health_is_that_of_the_best() -> None:
    async def main(_: VirtualLoop) -> None:
        first, second = ScriptedRunner(), ScriptedRunner()
        async with fleet(first, second, max_restarts=0, how={"patience": 1.0}) as (coordinator, _):
            assert (await coordinator.health()).ok
            first.crash()
            await settle()
            assert (await coordinator.health()).ok
            second.crash()
            await settle()
            health = await coordinator.health()
            assert (health.ok, health.state) == (False, "failed")
            await asyncio.sleep(1.0)
            with pytest.raises(SubmitError) as refused:
                await coordinator.submit(ask())
            assert refused.value.reason == "unavailable" or isinstance(
                refused.value, EngineFailedError
            )

    virtually(main)


def test_room_is_that_of_all_together_and_of_one_for_one_request() -> None:
    async def main(_: VirtualLoop) -> None:
        async with fleet(ScriptedRunner(HANG), ScriptedRunner(HANG), max_concurrent=4) as (
            coordinator,
            _,
        ):
            coordinator.check_room(8)
            with pytest.raises(UnsupportedRequestError):
                coordinator.check_room(9)
            with pytest.raises(UnsupportedRequestError, match="no replica has more than 4"):
                await coordinator.submit(ask(n=5))
            handles = [await coordinator.submit(ask(n=3)) for _ in range(2)]
            assert handles[1].id == handles[0].id + 3
            coordinator.check_room(2)
            with pytest.raises(SubmitError) as refused:
                coordinator.check_room(3)
            assert refused.value.reason == "backlog_full"
            card = coordinator.card
            assert (card.max_pending, card.max_batch_size) == (8, 8)
            assert 0.1 <= coordinator.retry_after() <= 60
            coordinator.cancel_all()
            with pytest.raises(UnsupportedRequestError):
                await coordinator.submit(LLMGenerationRequest.batch([ask(), ask()]))

    virtually(main)


def test_a_drain_finishes_what_is_there_also_what_has_to_move() -> None:
    async def main(loop: VirtualLoop) -> None:
        first, second = ScriptedRunner(SLOW), ScriptedRunner(Play(tokens=2, between=3.0))
        async with fleet(first, second, policy="round-robin") as (coordinator, _):
            one, two = [await coordinator.submit(ask()) for _ in range(2)]
            draining = asyncio.ensure_future(coordinator.drain(None))
            await settle()
            assert not coordinator.accepting
            assert (await coordinator.health()).state == "stopping"
            for refuse in (coordinator.submit(ask()),):
                with pytest.raises(SubmitError, match="shutting down"):
                    await refuse
            with pytest.raises(SubmitError):
                coordinator.check_room(1)
            assert len((await one.result()).token_ids) == 3
            assert len((await two.result()).token_ids) == 2
            await draining
            assert loop.time() == pytest.approx(7.0, abs=0.3)
            assert (await coordinator.health()).state == "stopped"

    virtually(main)


def test_a_drain_that_runs_out_of_patience_cancels() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with fleet(ScriptedRunner(HANG), ScriptedRunner(HANG)) as (coordinator, _):
            handles = [await coordinator.submit(ask()) for _ in range(4)]
            await coordinator.drain(2.0)
            assert loop.time() == pytest.approx(2.0, abs=0.3)
            for handle in handles:
                with pytest.raises(RequestCancelledError):
                    await handle.result()
            assert coordinator.account.cancelled == 4

    virtually(main)


def test_text_becomes_ids_where_a_replica_needs_them() -> None:
    async def main(_: VirtualLoop) -> None:
        async with fleet(ScriptedRunner(), ScriptedRunner(reads_text=False)) as (coordinator, _):
            await (await coordinator.submit(LLMGenerationRequest("ab"))).result()
            seen = [
                one.batch.request.prompt
                for seat in coordinator._rotation.seats.values()
                for one in seat.actor.runner.seen
            ]  # type: ignore[attr-defined]
            assert seen == [(97, 98)]

    virtually(main)


def test_a_credit_lasts_until_an_answer_that_knows_of_it() -> None:
    async def main(_: VirtualLoop) -> None:
        async with fleet(ScriptedRunner(HANG), max_concurrent=10) as (coordinator, _):
            rotation = coordinator._rotation
            (seat,) = rotation.seats.values()
            await settle()
            handles = [await coordinator.submit(ask()) for _ in range(3)]
            assert (seat.load, seat.credit) == (0.0, 3)
            assert seat.score == pytest.approx(0.3)
            await asyncio.sleep(0.26)
            assert (seat.load, seat.credit) == (0.3, 0)
            # Asked now, answered in the next turn: what comes in between stays a credit.
            rotation.poll()
            seat.give(1)
            await settle(3)
            assert (seat.load, seat.credit) == (0.3, 1)
            for handle in handles:
                handle.cancel()

    virtually(main)
