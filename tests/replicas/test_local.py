"""A runner over an engine in this process: nothing is lost on the way, and its death is noticed."""

from __future__ import annotations

import asyncio
import functools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from steppe.client import LocalClient
from steppe.errors import (
    CheckpointError,
    ReplicaLostError,
    RequestCancelledError,
    SubmitError,
    UnsupportedRequestError,
)
from steppe.replicas.engine_core import EngineCoreActor
from steppe.replicas.messages import LocalEngineConfig
from steppe.replicas.output import whole_response
from steppe.replicas.runners.local import LocalRunner, renamed
from steppe.replicas.vocabulary import ExecuteBatch, TransportKind
from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.testing import assert_idle_clean
from tests.replicas.engines import broken, scripted
from tests.replicas.helpers import NoText, ask, batch, collect
from tests.server.support import fake_llm, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_a_response_is_what_the_engine_itself_answers(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with fake_llm(tmp_path) as llm:
        runner = LocalRunner(lambda: LocalClient.of(llm))
        await runner.start()
        assert runner.transport_kind is TransportKind.LOCAL_CPU
        assert runner.card.name == llm.name
        for request in (
            LLMGenerationRequest([1, 2, 3], params=SamplingParams(max_tokens=6, temperature=0)),
            LLMGenerationRequest(
                [5, 6, 7],
                params=SamplingParams(
                    max_tokens=5, temperature=0, n=3, logprobs=2, prompt_logprobs=1
                ),
            ),
            LLMGenerationRequest([5, 6, 7, 8], task="embed"),
        ):
            expected = llm.engine.submit(request).get()
            assert whole_response(await collect(runner, ExecuteBatch(7, request))) == expected
        await runner.close()
        assert isinstance(await runner.lost(), ReplicaLostError)
        assert_idle_clean(llm.engine)


async def test_the_status_tells_of_the_cache(tmp_path: Path) -> None:
    with fake_llm(tmp_path) as llm:
        runner = LocalRunner(lambda: LocalClient.of(llm))
        await runner.start()
        for number in (1, 2):
            await collect(runner, batch(number, prompt=100))
        cache = (await runner.status()).cache
        assert cache is not None
        assert cache.reused_tokens > 0
        assert cache == llm.engine.context_cache_metrics()
        await runner.close()


async def test_closing_a_stream_cancels_even_before_it_was_read() -> None:
    runner = LocalRunner(functools.partial(scripted, step_seconds=0.001))
    await runner.start()
    for read in (0, 1):
        stream = await runner.execute(batch(max_tokens=4000))
        if read:
            await anext(stream)
        await stream.aclose()
        await stream.aclose()
    engine = runner.client._engine
    await until(lambda: not engine.pending)
    assert engine.metrics().cancelled == 2
    await runner.close()
    assert_idle_clean(engine)


async def test_an_engine_that_is_lost_is_noticed_and_started_anew() -> None:
    made = []

    def load() -> LocalClient:
        made.append(1)
        return scripted(lose_at=3 if len(made) == 1 else None)

    config = LocalEngineConfig(restart_pause=0.001)
    actor = EngineCoreActor(LocalRunner(load), config, text=NoText())
    await actor.start()
    handle = await actor.submit(ask(max_tokens=50))
    with pytest.raises(ReplicaLostError, match="device is gone"):
        await handle.result()
    with pytest.raises((SubmitError, ReplicaLostError)):
        await actor.submit(ask())
    while actor.generation < 2:
        await asyncio.sleep(0)  # its supervisor has not heard yet
        await actor.start()
    assert len((await (await actor.submit(ask())).result()).token_ids) == 4
    assert (actor.generation, len(made)) == (2, 2)
    await actor.drain(5.0)


async def test_refusals_and_cancels_of_the_engine_come_through() -> None:
    runner = LocalRunner(functools.partial(scripted, max_pending=1))
    with pytest.raises(SubmitError, match="not been started"):
        runner.card  # noqa: B018
    await runner.start()
    with pytest.raises(UnsupportedRequestError):
        await runner.execute(batch(n=2))
    stream = await runner.execute(batch(max_tokens=4000))
    runner.client.cancel_all()
    with pytest.raises(RequestCancelledError):
        async for _ in stream:
            pass
    await runner.close()


async def test_a_model_that_cannot_be_loaded_says_so_and_an_unwanted_one_is_ended() -> None:
    with pytest.raises(CheckpointError, match="cut short"):
        await LocalRunner(broken).start()

    go = threading.Event()
    made = []

    def slow() -> LocalClient:
        go.wait()
        made.append(scripted())
        return made[0]

    starting = asyncio.ensure_future(LocalRunner(slow).start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    go.set()
    await until(lambda: bool(made) and not made[0].accepting)


async def test_what_an_engine_does_is_told_under_the_ids_of_batches() -> None:
    runner = LocalRunner(functools.partial(scripted, step_seconds=0.002))
    await runner.start()
    await runner.activity()
    streams = [
        await runner.execute(batch(100, n=2, max_tokens=4000)),
        await runner.execute(batch(200, max_tokens=4000)),
    ]
    for stream in streams:
        await anext(stream)
    found = await runner.activity()
    assert {one.request_id for one in found.live} == {100, 200}
    assert {one.id for one in found.live} == {100, 101, 200}
    named = {one for step in found.steps for one in (*step.decodes, *dict(step.prefills))}
    assert named <= {100, 101, 200}
    assert named
    unknown = renamed(found, {})
    assert unknown.live == ()
    assert all(step.decodes == () for step in unknown.steps)
    assert unknown.steps[0].number == found.steps[0].number
    assert replace(found, live=(), steps=()) == replace(unknown, live=(), steps=())
    for stream in streams:
        await stream.aclose()
    await runner.close()
