"""An engine in this process as a target."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from steppe.bench.load import run_load
from steppe.bench.schedule import Arrival
from steppe.bench.target import AnswerError, LocalTarget
from steppe.client import LocalClient
from steppe.testing import Script, assert_idle_clean
from tests.server.support import fake_llm, staged

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_answers_are_as_long_as_asked(tmp_path: Path) -> None:
    with fake_llm(tmp_path, max_batch_size=4) as llm:
        target = LocalTarget(LocalClient.of(llm))
        arrivals = [Arrival(index, 0.0, 3, 5 + index) for index in range(6)]
        samples = await run_load(target, arrivals, ["a b c"] * 6)
        assert [one.error for one in samples] == [None] * 6
        assert [one.tokens for one in samples] == [5, 6, 7, 8, 9, 10]
        assert all(1 <= len(one.chunks) <= one.tokens for one in samples)
        assert {one.prompt_tokens for one in samples} == {5}
        with pytest.raises(AnswerError) as caught:
            await target.answer("a b c", llm.context_length, lambda: None)
        assert caught.value.kind == "invalid_request"
        assert_idle_clean(llm.engine)


async def test_what_an_engine_refuses_is_counted_by_its_reason() -> None:
    async with staged(max_pending=1) as stage:
        target = LocalTarget(stage.client)
        first = asyncio.ensure_future(target.answer("x", 3, lambda: None))
        await stage.step()
        with pytest.raises(AnswerError) as full:
            await target.answer("y", 3, lambda: None)
        assert full.value.kind == "refused_backlog_full"
        await stage.step(5)
        assert (await first).output == 3


async def test_a_request_that_dies_is_an_error() -> None:
    async with staged(script=Script(fail_requests={1: 2})) as stage:
        answer = asyncio.ensure_future(LocalTarget(stage.client).answer("x", 9, lambda: None))
        await stage.step(6)
        with pytest.raises(AnswerError) as caught:
            await answer
        assert caught.value.kind == "request_failed"


async def test_a_timeout_cancels_the_request() -> None:
    async with staged() as stage:
        (sample,) = await run_load(
            LocalTarget(stage.client), [Arrival(0, 0.0, 1, 50)], ["x"], give_up=0.05
        )
        assert sample.error == "timeout"
        await stage.step(2)
        assert stage.engine.metrics().cancelled == 1
