"""The scripted runner keeps the promises of a runner, so that what it shows means something."""

from __future__ import annotations

import asyncio

import pytest

from steppe.errors import BackpressureError, ReplicaLostError, RequestFailedError, SubmitError
from steppe.replicas.output import whole_response
from steppe.replicas.runners.scripted import Play, ScriptedRunner
from steppe.testing import VirtualLoop, virtually
from tests.replicas.helpers import batch, collect, settle


def test_its_chunks_make_a_response() -> None:
    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(Play(tokens=3))
        await runner.start()
        answer = whole_response(await collect(runner, batch(5)))
        assert answer.token_ids == (5, 6, 7)
        assert answer.usage.completion_tokens == 3
        status = await runner.status()
        assert (status.metrics.submitted, status.metrics.completed) == (1, 1)
        assert runner.live == runner.resident == 0

    virtually(main)


def test_time_is_what_the_play_says_and_seats_are_taken_in_order() -> None:
    async def main(loop: VirtualLoop) -> None:
        runner = ScriptedRunner(Play(tokens=2, first=1.0, between=0.5), seats=1, start_seconds=2.0)
        await runner.start()
        assert loop.time() == pytest.approx(2.0)
        ends = []

        async def one(number: int) -> None:
            await collect(runner, batch(number))
            ends.append((number, loop.time()))

        async with asyncio.TaskGroup() as group:
            for number in (1, 2, 3):
                group.create_task(one(number))
        assert [number for number, _ in ends] == [1, 2, 3]
        assert [when for _, when in ends] == pytest.approx([3.5, 5.0, 6.5])
        assert runner.most_resident == 1

    virtually(main)


def test_the_third_takes_the_seat_that_is_free() -> None:
    """Check 8 of the specification: a long one runs, and the third does not wait for it."""

    async def main(loop: VirtualLoop) -> None:
        plays = {1: Play(tokens=1, first=100.0), 2: Play(tokens=1, first=1.0)}
        runner = ScriptedRunner(lambda one: plays.get(one.request_id, Play()), seats=2)
        await runner.start()
        calls = [asyncio.ensure_future(collect(runner, batch(n))) for n in (1, 2, 3)]
        await calls[2]
        assert loop.time() == pytest.approx(1.0)
        await asyncio.gather(*calls)

    virtually(main)


def test_closing_a_stream_cancels_it_wherever_it_is() -> None:
    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(Play(tokens=100, between=1.0), seats=1)
        await runner.start()
        running = await runner.execute(batch(1))
        await anext(running)
        waiting = asyncio.ensure_future(collect(runner, batch(2)))
        await settle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await running.aclose()
        await running.aclose()
        assert [(one.chunks, one.left) for one in runner.seen] == [(1, True), (0, True)]
        assert len(await collect(runner, batch(3))) == 101
        assert runner.outcomes["cancelled"] == 2
        assert runner.live == runner.resident == 0

    virtually(main)


def test_a_crash_ends_everything_and_a_start_begins_anew() -> None:
    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(Play(ending="hang"), seats=2)
        await runner.start()
        calls = [asyncio.ensure_future(collect(runner, batch(number))) for number in (1, 2, 3)]
        watch = asyncio.ensure_future(runner.lost())
        await settle()
        runner.crash()
        for done in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(done, ReplicaLostError)
        assert isinstance(await watch, ReplicaLostError)
        with pytest.raises(ReplicaLostError):
            await runner.execute(batch(4))
        with pytest.raises(ReplicaLostError):
            await runner.status()
        assert runner.live == runner.resident == 0
        await runner.start()
        runner.play = Play()
        assert await collect(runner, batch(5))

    virtually(main)


def test_frozen_it_answers_nothing_until_it_thaws() -> None:
    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner()
        await runner.start()
        runner.freeze()
        call = asyncio.ensure_future(collect(runner, batch()))
        probe = asyncio.ensure_future(runner.status())
        await settle()
        assert not call.done()
        assert not probe.done()
        runner.thaw()
        assert await call
        assert (await probe).health.ok

    virtually(main)


def test_what_it_refuses_it_has_not_begun() -> None:
    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(Play(ending="hang"), limit=1)
        await runner.start()
        stream = await runner.execute(batch(1))
        await anext(stream)
        with pytest.raises(BackpressureError):
            await runner.execute(batch(2))
        await stream.aclose()
        runner.play = Play(refuse=SubmitError("unavailable", "not now"))
        with pytest.raises(SubmitError, match="not now"):
            await runner.execute(batch(3))
        assert [one.batch.request_id for one in runner.seen] == [1]

    virtually(main)


@pytest.mark.parametrize(
    ("ending", "chunks"), [("silence", [False] * 4), ("babble", [False] * 4 + [True, False])]
)
def test_it_can_end_badly(ending: str, chunks: list[bool]) -> None:
    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(Play(ending=ending))  # type: ignore[arg-type]
        await runner.start()
        assert [chunk.finished for chunk in await collect(runner, batch())] == chunks
        runner.play = Play(ending="raise", error=RequestFailedError("as scripted"))
        with pytest.raises(RequestFailedError, match="as scripted"):
            await collect(runner, batch())

    virtually(main)


def test_closed_it_is_dead() -> None:
    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(Play(ending="hang"))
        await runner.close()
        await runner.start()
        call = asyncio.ensure_future(collect(runner, batch(1)))
        await settle()
        await runner.close()
        await runner.close()
        with pytest.raises(ReplicaLostError, match="closed"):
            await call

    virtually(main)


def test_one_that_gives_up_as_the_line_moves_takes_no_seat() -> None:
    async def main(_: VirtualLoop) -> None:
        runner = ScriptedRunner(Play(ending="hang"), seats=1)
        await runner.start()
        reading = [asyncio.ensure_future(collect(runner, batch(number))) for number in (1, 2)]
        await settle()
        assert (runner.live, runner.resident) == (2, 1)
        reading[1].cancel()
        runner.crash()
        first, second = await asyncio.gather(*reading, return_exceptions=True)
        assert isinstance(first, ReplicaLostError)
        assert isinstance(second, asyncio.CancelledError)
        assert runner.live == runner.resident == 0

    virtually(main)
