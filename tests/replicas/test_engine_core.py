"""One replica: places, ends, the account, slow readers and cancels (spec 8.2, checks 1 to 5)."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest

from steppe.errors import (
    BackpressureError,
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    NetworkError,
    ReplicaError,
    ReplicaLostError,
    RequestCancelledError,
    RequestFailedError,
    SubmitError,
    UnsupportedRequestError,
)
from steppe.replicas.messages import AddRequest, GetLoad, LocalEngineConfig
from steppe.replicas.output import OutputChannel
from steppe.replicas.runners.scripted import Play, ScriptedRunner
from steppe.replicas.vocabulary import ExecuteBatch, ReplicaState
from steppe.request import LLMGenerationRequest
from steppe.testing import VirtualLoop, virtually
from tests.replicas.helpers import ask, check_account, load_of, replica, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.replicas.engine_core import EngineCoreActor
    from steppe.replicas.handle import ReplicaHandle

HANG = Play(ending="hang")


def end_by_cancel(runner: ScriptedRunner, handles: list[ReplicaHandle]) -> None:
    handles[0].cancel()


def end_by_dropping(runner: ScriptedRunner, handles: list[ReplicaHandle]) -> None:
    del handles[0]
    gc.collect()


def end_by_cancel_from_another_thread(runner: ScriptedRunner, handles: list[ReplicaHandle]) -> None:
    thread = threading.Thread(target=handles[0].cancel)
    thread.start()
    thread.join()


@pytest.mark.parametrize("end", [end_by_cancel, end_by_dropping, end_by_cancel_from_another_thread])
def test_a_place_is_held_from_admission_to_the_end_and_given_back_once(
    end: Callable[[ScriptedRunner, list[ReplicaHandle]], None],
) -> None:
    """Check 1, under cancel and under the loss of the reader."""

    async def main(_: VirtualLoop) -> None:
        async with replica(ScriptedRunner(HANG), max_concurrent=3) as (actor, runner):
            handles = [await actor.submit(ask()) for _ in range(3)]
            with pytest.raises(BackpressureError, match="3 of 3 places"):
                await actor.submit(ask())
            end(runner, handles)
            await settle()
            handles.append(await actor.submit(ask()))
            with pytest.raises(BackpressureError):
                await actor.submit(ask())
            check_account(actor)
            assert actor.refused == {"backlog_full": 2}
            for handle in handles:
                handle.cancel()

    virtually(main)


@pytest.mark.parametrize(
    ("play", "error"),
    [
        (Play(), None),
        (Play(ending="raise", error=RequestFailedError("a step failed")), RequestFailedError),
        (Play(ending="raise", error=DeadlineExceededError("total", "late")), DeadlineExceededError),
        (Play(ending="raise", error=ZeroDivisionError("a bug")), ReplicaError),
        (Play(ending="silence"), NetworkError),
        (Play(ending="babble"), None),
        (Play(tokens=0, ending="silence"), NetworkError),
    ],
)
def test_however_its_stream_ends_a_request_ends_once_and_its_place_is_free(
    play: Play, error: type[Exception] | None
) -> None:
    """Check 1, under everything that a runner may do."""

    async def main(_: VirtualLoop) -> None:
        async with replica(ScriptedRunner(play), max_concurrent=1) as (actor, _):
            for number in range(1, 4):
                handle = await actor.submit(ask())
                chunks = []
                if error is None:
                    chunks = [chunk async for chunk in handle]
                    assert [chunk.usage is not None for chunk in chunks] == [False] * 4 + [True]
                    assert (await handle.result()).text == "".join(c.text for c in chunks)
                else:
                    for _ in range(2):
                        with pytest.raises(error):
                            await handle.result()
                assert handle.ready
                assert actor.in_flight == 0, "free before anybody heard of the end"
                outcomes = (actor.account.completed, actor.account.failed)
                assert outcomes == ((number, 0) if error is None else (0, number))
            assert actor.account.expired == (3 if error is DeadlineExceededError else 0)

    virtually(main)


def test_a_runner_that_crashes_fails_its_requests_and_comes_back() -> None:
    """Check 1, under a crash of the runner."""

    async def main(_: VirtualLoop) -> None:
        async with replica(ScriptedRunner(HANG), max_concurrent=2) as (actor, runner):
            for round_ in (1, 2, 3):
                handles = [await actor.submit(ask()) for _ in range(2)]
                await settle()
                runner.crash()
                for handle in handles:
                    with pytest.raises(ReplicaLostError, match="crashed"):
                        await handle.result()
                assert actor.in_flight == 0
                with pytest.raises(SubmitError) as refused:
                    await actor.submit(ask())
                assert refused.value.reason == "unavailable"
                await actor.start()
                assert actor.generation == round_ + 1
            metrics = await actor.metrics()
            assert (metrics.submitted, metrics.failed, metrics.refused) == (6, 6, 3)

    virtually(main)


def test_even_a_runner_that_forgets_its_streams_leaves_nobody_waiting() -> None:
    class Forgetful(ScriptedRunner):
        async def _pause(self, seconds: float) -> None:
            await asyncio.sleep(1e9)

    async def main(_: VirtualLoop) -> None:
        async with replica(Forgetful()) as (actor, runner):
            handle = await actor.submit(ask())
            await settle()
            runner.crash()
            with pytest.raises(ReplicaLostError):
                await handle.result()

    virtually(main)


def test_as_many_as_there_are_places_run_at_once() -> None:
    """Check 2: nothing is serialised on the way to a runner that batches."""

    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(Play(between=1.0))
        async with replica(runner, max_concurrent=8) as (actor, _):
            handles = [await actor.submit(ask()) for _ in range(8)]
            await asyncio.gather(*(handle.result() for handle in handles))
            assert runner.most_resident == 8

    virtually(main)


def test_a_reader_that_never_reads_holds_up_nobody() -> None:
    """Check 3. What it does not take stays within its own request's output."""

    async def main(loop: VirtualLoop) -> None:
        runner = ScriptedRunner(Play(tokens=1000, between=0.01))
        async with replica(runner, max_concurrent=4) as (actor, _):
            handles = [await actor.submit(ask()) for _ in range(4)]
            answers = await asyncio.gather(*(handle.result() for handle in handles[1:]))
            assert loop.time() == pytest.approx(9.99)
            assert all(len(answer.token_ids) == 1000 for answer in answers)
            chunks = [chunk async for chunk in handles[0]]
            assert len(chunks) < 100
            assert sum(len(chunk.token_ids) for chunk in chunks) == 1000

    virtually(main)


def test_who_cancels_in_the_queue_is_never_run() -> None:
    """Check 4, first half: between admission and the runner, and in the runner's own queue."""

    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(lambda one: Play(delay=5.0 if one.request_id == 1 else 0.0))
        async with replica(runner) as (actor, _):
            submitting = asyncio.ensure_future(actor.submit(ask()))
            await settle()
            assert actor.in_flight == 1
            submitting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await submitting
            await settle()
            assert actor.in_flight == 0
            assert runner.seen == []
            assert actor.account.cancelled == 1

            runner.seats, runner.play = 1, HANG
            first, second = await actor.submit(ask()), await actor.submit(ask())
            await settle()
            second.cancel()
            with pytest.raises(RequestCancelledError):
                await second.result()
            await settle()
            assert [one.chunks for one in runner.seen] == [4, 0]
            first.cancel()

    virtually(main)


def test_who_cancels_in_the_midst_gets_one_step_more_at_most() -> None:
    """Check 4, second half; the caller is released at once."""

    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(Play(tokens=100, between=1.0))
        async with replica(runner) as (actor, _):
            handle = await actor.submit(ask())
            chunks = aiter(handle)
            await anext(chunks)
            await anext(chunks)
            waiting = asyncio.ensure_future(handle.result())  # the loop is left without an end
            await settle()
            produced = runner.seen[0].chunks
            handle.cancel()
            handle.cancel()
            with pytest.raises(RequestCancelledError):
                await waiting
            await settle()
            assert runner.seen[0].left
            assert runner.seen[0].chunks <= produced + 1
            assert (actor.account.cancelled, actor.account.failed) == (1, 0)

    virtually(main)


def test_leaving_the_loop_early_and_ending_the_task_cancel() -> None:
    async def main(_: VirtualLoop) -> None:
        async with replica(ScriptedRunner(HANG)) as (actor, _):
            handle = await actor.submit(ask())
            async for _ in handle:
                break
            await settle()
            waiting = asyncio.ensure_future((await actor.submit(ask())).result())
            await settle()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await settle()
            assert actor.account.cancelled == 2

    virtually(main)


def test_cancel_by_id_hits_that_one_and_unknown_ids_are_ignored() -> None:
    async def main(_: VirtualLoop) -> None:
        async with replica(ScriptedRunner(HANG)) as (actor, _):
            one, two = await actor.submit(ask()), await actor.submit(ask())
            for request_id in (0, 77, one.id, one.id):
                actor.cancel(request_id)
            await settle()
            assert (one.ready, two.ready) == (True, False)
            actor.cancel_all()
            assert two.ready

    virtually(main)


def test_load_rises_with_accepted_work_and_returns_to_zero() -> None:
    """Check 5."""

    async def main(_: VirtualLoop) -> None:
        async with replica(ScriptedRunner(HANG), max_concurrent=4) as (actor, _):
            assert await load_of(actor) == 0.0
            handles = []
            for taken in range(1, 5):
                handles.append(await actor.submit(ask()))
                assert await load_of(actor) == taken / 4
            for handle in handles:
                handle.cancel()
            await settle()
            assert await load_of(actor) == 0.0

    virtually(main)


def test_several_sequences_take_several_places() -> None:
    async def main(_: VirtualLoop) -> None:
        async with replica(ScriptedRunner(HANG), max_concurrent=4) as (actor, _):
            handle = await actor.submit(ask(n=3))
            assert (actor.in_flight, actor.account.live) == (3, 1)
            with pytest.raises(BackpressureError):
                await actor.submit(ask(n=2))
            other = await actor.submit(ask(n=1))
            assert other.id == handle.id + 3, "its sequences have the ids in between"
            with pytest.raises(UnsupportedRequestError, match="no more than 4"):
                await actor.submit(ask(n=5))
            handle.cancel()
            other.cancel()

    virtually(main)


def test_the_mailbox_is_bounded() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with replica(max_concurrent=100, queue_capacity=5) as (actor, _):
            admissions: list[asyncio.Future[None]] = [loop.create_future() for _ in range(5)]
            outputs = [OutputChannel() for _ in range(5)]
            for number, (admission, output) in enumerate(zip(admissions, outputs, strict=True), 1):
                actor.tell(AddRequest(ExecuteBatch(number, ask()), output, admission))
            with pytest.raises(BackpressureError) as refused:
                actor.tell(GetLoad(loop.create_future()))
            assert refused.value.reason == "queue_full"
            await asyncio.gather(*admissions)
            assert actor.in_flight == 5
            for output in outputs:
                await output.accepted()
                while await output.pop() is not None:
                    pass

    virtually(main)


def test_admission_is_answered_before_the_runner_is_asked() -> None:
    async def main(loop: VirtualLoop) -> None:
        runner = ScriptedRunner(Play(delay=10.0))
        async with replica(runner) as (actor, _):
            admission: asyncio.Future[None] = loop.create_future()
            output = OutputChannel()
            actor.tell(AddRequest(ExecuteBatch(1, ask()), output, admission))
            await admission
            assert loop.time() == 0.0
            assert runner.seen == []
            await output.accepted()
            assert loop.time() == pytest.approx(10.0)
            while await output.pop() is not None:
                pass

    virtually(main)


def test_whoever_left_before_admission_takes_no_place() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with replica() as (actor, runner):
            admission: asyncio.Future[None] = loop.create_future()
            reply: asyncio.Future[float] = loop.create_future()
            actor.tell(AddRequest(ExecuteBatch(1, ask()), OutputChannel(), admission))
            actor.tell(GetLoad(reply))
            admission.cancel()
            reply.cancel()
            await settle()
            assert runner.seen == []
            assert actor.account.submitted == 0

    virtually(main)


def test_a_request_that_is_wrong_is_refused_before_a_response_begins() -> None:
    async def main(_: VirtualLoop) -> None:
        wrong = InvalidRequestError("prompt", "has no meaning")
        async with replica(ScriptedRunner(Play(refuse=wrong))) as (actor, runner):
            with pytest.raises(InvalidRequestError, match="no meaning"):
                await actor.submit(ask())
            assert actor.account.submitted == actor.refused.total() == 0
            runner.play = Play(refuse=BackpressureError("queue_full", "the engine is full"))
            with pytest.raises(BackpressureError, match="the engine is full"):
                await actor.submit(ask())
            assert (actor.account.submitted, actor.refused.total()) == (0, 1)
            runner.play = Play(refuse=ReplicaLostError("nobody there"))
            with pytest.raises(ReplicaLostError):
                await actor.submit(ask())
            assert (actor.account.submitted, actor.account.failed) == (1, 1)
            several = LLMGenerationRequest.batch([ask(), ask()])
            with pytest.raises(UnsupportedRequestError):
                await actor.submit(several)

    virtually(main)


def test_a_runner_that_reads_no_text_gets_ids() -> None:
    async def main(_: VirtualLoop) -> None:
        async with replica() as (actor, runner):
            await (await actor.submit(LLMGenerationRequest("ab"))).result()
            runner.reads_text = False
            await (await actor.submit(LLMGenerationRequest("ab"))).result()
            assert [one.batch.request.prompt for one in runner.seen] == ["ab", (97, 98)]
            assert await actor.detokenize([97]) == "a"

    virtually(main)


def test_a_check_for_room_says_what_a_submit_would() -> None:
    async def main(_: VirtualLoop) -> None:
        async with replica(ScriptedRunner(HANG), max_concurrent=2) as (actor, _):
            actor.check_room(2)
            with pytest.raises(UnsupportedRequestError):
                actor.check_room(3)
            handle = await actor.submit(ask())
            actor.check_room(1)
            with pytest.raises(BackpressureError):
                actor.check_room(2)
            assert actor.refused.total() == 0, "only a question"
            assert actor.card.max_pending == 2
            assert 0.1 <= actor.retry_after() <= 60
            handle.cancel()

    virtually(main)


def drained(actor: EngineCoreActor) -> Any:
    return asyncio.ensure_future(actor.drain(None))


def test_a_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with replica(ScriptedRunner(Play(between=1.0))) as (actor, _):
            handle = await actor.submit(ask())
            first, second = drained(actor), drained(actor)
            await settle()
            assert actor.state is ReplicaState.DRAINING
            assert not actor.accepting
            assert (await actor.health()).state == "stopping"
            with pytest.raises(SubmitError, match="shutting down"):
                await actor.submit(ask())
            with pytest.raises(SubmitError):
                await load_of(actor)
            assert len((await handle.result()).token_ids) == 4
            await asyncio.gather(first, second)
            assert loop.time() == pytest.approx(3.0)
            assert actor.state is ReplicaState.STOPPED
            assert (await actor.health()).state == "stopped"

    virtually(main)


def test_a_drain_that_runs_out_of_patience_cancels() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with replica(ScriptedRunner(HANG)) as (actor, _):
            handle = await actor.submit(ask())
            await actor.drain(2.0)
            assert loop.time() == pytest.approx(2.0)
            with pytest.raises(RequestCancelledError):
                await handle.result()

    virtually(main)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_concurrent", 0),
        ("queue_capacity", True),
        ("max_restarts", -1),
        ("probe_interval", 0),
        ("max_silence", float("inf")),
        ("restart_pause", "soon"),
    ],
)
def test_settings_out_of_range_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        LocalEngineConfig(**{field: value})
    assert refused.value.field == field
    assert LocalEngineConfig() == LocalEngineConfig(max_concurrent=32, queue_capacity=1024)
