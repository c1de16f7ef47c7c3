"""P06: a cancel was logged and generation went on. The bound is one step, also within a prompt."""

from __future__ import annotations

from steppe.testing import Hold
from tests.engine.helpers import ask, run, tick

from .engines import scripted


def test_a_long_prompt_stops_between_chunks() -> None:
    with scripted(context=40_000, config={"max_step_tokens": 512}) as (engine, runtime):
        handle = engine.submit(ask(5, prompt=32_000))
        tick(engine, 2)
        assert runtime.prompt_tokens[handle.id] == 1024
        engine.cancel(handle.id)
        run(engine)
        assert runtime.prompt_tokens[handle.id] == 1024


def test_a_cancel_during_a_chunk_lets_that_chunk_end_and_no_other_begin() -> None:
    hold = Hold()
    with scripted(
        manual=False, context=40_000, holds={2: hold}, config={"max_step_tokens": 512}
    ) as (engine, runtime):
        handle = engine.submit(ask(5, prompt=32_000))
        assert hold.entered.wait(10)
        engine.cancel(handle.id)
        hold.release()
        engine.shutdown()
        assert runtime.prompt_tokens[handle.id] == 1024
