"""The open loop, in virtual time: nobody waits for anybody, and lateness shows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from steppe.bench.load import run_load
from steppe.bench.schedule import Arrival, Lengths, poisson
from steppe.bench.stats import Objectives, Sample, summarize
from steppe.bench.target import AnswerError, Counts
from steppe.testing import VirtualLoop, virtually
from tests.bench.virtual import QueueTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from steppe.bench.target import Target


def run(target: Target, arrivals: Sequence[Arrival], **how: float) -> list[Sample]:
    async def main(loop: VirtualLoop) -> list[Sample]:
        return await run_load(target, arrivals, ["x"] * len(arrivals), clock=loop.time, **how)

    return virtually(main)


def every(seconds: float, count: int) -> list[Arrival]:
    return [Arrival(index, index * seconds, 5, 4) for index in range(count)]


def test_a_slow_answer_delays_no_other_request() -> None:
    samples = run(QueueTarget(10.0), every(1.0, 5))
    assert [one.sent for one in samples] == pytest.approx([0, 1, 2, 3, 4])
    assert [one.ended for one in samples] == pytest.approx([10, 20, 30, 40, 50])
    assert [one.first for one in samples] == pytest.approx([2.5, 11.5, 20.5, 29.5, 38.5])
    assert [one.between for one in samples] == pytest.approx([2.5] * 5)
    assert {(one.tokens, one.prompt_tokens) for one in samples} == {(4, 1)}
    assert summarize(samples, Objectives()).late == 0


class Blocking:
    """A target whose answers keep the load generator itself from running."""

    name = "blocking"

    async def answer(self, prompt: str, output_tokens: int, on_text: Callable[[], None]) -> Counts:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.now += 3.0
        on_text()
        return Counts()


def test_a_late_generator_is_found_out_and_leaves_no_wait_out() -> None:
    samples = run(Blocking(), every(1.0, 4))
    summary = summarize(samples, Objectives())
    assert summary.late == 3
    assert summary.lateness.most == pytest.approx(6.0)
    # What the fourth client waited: until the three before it had been served, and its own turn.
    assert samples[3].whole == pytest.approx(9.0)
    assert [one.tokens for one in samples] == [1] * 4  # it did not say, so chunks are counted


class Failing:
    """Ends each request in another way."""

    name = "failing"

    async def answer(self, prompt: str, output_tokens: int, on_text: Callable[[], None]) -> Counts:
        match output_tokens:
            case 1:
                raise AnswerError("http_429", "busy")
            case 2:
                on_text()
                raise AnswerError("broken_stream")
            case 3:
                await asyncio.sleep(1e6)
            case 4:
                return Counts(1, 0)
            case _:
                on_text()
        return Counts(1, 1)


def test_errors_are_samples_by_kind() -> None:
    arrivals = [Arrival(index, 0.5 * index, 1, index + 1) for index in range(5)]
    samples = run(Failing(), arrivals, give_up=20.0)
    kinds = ["http_429", "broken_stream", "timeout", "empty_answer", None]
    assert [one.error for one in samples] == kinds
    assert samples[2].whole == pytest.approx(20.0)
    assert summarize(samples, Objectives()).completed == 1


def test_a_queue_drifts_by_what_it_is_offered_too_much(seed: int) -> None:
    count = 1500
    for load, lowest, highest in ((0.5, -0.1, 0.1), (1.5, 0.15, 0.9), (3.0, 1.3, 2.7)):
        arrivals = poisson(load, count, Lengths(1, 1), Lengths(1, 1), seed)
        summary = summarize(run(QueueTarget(1.0), arrivals), Objectives())
        assert lowest < summary.drift < highest, load
        assert summary.completed == count


def test_everyone_is_told_of_as_it_ends() -> None:
    ended: list[int] = []

    async def main(loop: VirtualLoop) -> None:
        await run_load(
            QueueTarget(1.0), every(0.1, 3), ["x"] * 3, clock=loop.time,
            on_end=lambda one: ended.append(one.index),
        )  # fmt: skip

    virtually(main)
    assert ended == [0, 1, 2]


def test_a_late_request_is_given_up_when_it_would_have_been() -> None:
    class BlockingOnce(QueueTarget):
        async def answer(
            self, prompt: str, output_tokens: int, on_text: Callable[[], None]
        ) -> Counts:
            if not self.prompts:
                loop = asyncio.get_running_loop()
                assert isinstance(loop, VirtualLoop)
                loop.now += 5.0
            return await super().answer(prompt, output_tokens, on_text)

    samples = run(BlockingOnce(100.0), every(1.0, 2), give_up=10.0)
    assert samples[1].sent == pytest.approx(5.0)
    assert samples[1].error == "timeout"
    assert samples[1].ended == pytest.approx(11.0)
