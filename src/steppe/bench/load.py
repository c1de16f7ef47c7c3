"""An open loop: every request goes out when it is due, whatever became of those before it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from steppe.bench.stats import Sample
from steppe.bench.target import AnswerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from steppe.bench.schedule import Arrival
    from steppe.bench.target import Target

__all__ = ["run_load"]


async def run_load(
    target: Target,
    arrivals: Sequence[Arrival],
    prompts: Sequence[str],
    *,
    give_up: float | None = None,
    on_end: Callable[[Sample], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Sample]:
    """Send every arrival's prompt at its time; what became of each, in order.

    An answer that takes longer than ``give_up`` seconds, counted from when it was due, is ended
    as an error of the kind ``timeout``. Errors are samples; nothing of them is raised.
    """
    start = clock()

    async def one(arrival: Arrival, prompt: str) -> Sample:
        sent = clock() - start
        chunks: list[float] = []
        prompt_tokens = tokens = 0
        error: str | None = None
        limit = None if give_up is None else max(0.0, arrival.at + give_up - sent)
        try:
            async with asyncio.timeout(limit):
                counts = await target.answer(
                    prompt, arrival.output_tokens, lambda: chunks.append(clock() - start)
                )
            tokens = len(chunks) if counts.output is None else counts.output
            prompt_tokens = counts.prompt or 0
            if not chunks:
                error = "empty_answer"
        except TimeoutError:
            error = "timeout"
        except AnswerError as failure:
            error = failure.kind
        sample = Sample(
            arrival.index,
            arrival.at,
            sent,
            clock() - start,
            tuple(chunks),
            tokens,
            prompt_tokens,
            error,
        )
        if on_end is not None:
            on_end(sample)
        return sample

    async with asyncio.TaskGroup() as group:
        tasks = []
        for arrival, prompt in zip(arrivals, prompts, strict=True):
            # Never less than one turn of the loop, or a late generator would not read answers.
            await asyncio.sleep(max(0.0, arrival.at - (clock() - start)))
            tasks.append(group.create_task(one(arrival, prompt)))
    return [task.result() for task in tasks]
