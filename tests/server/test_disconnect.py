"""A client that leaves ends its request, wherever that is, on every endpoint and ASGI version."""

from __future__ import annotations

from typing import Any

import pytest

from steppe.server.disconnect import Connection
from steppe.testing import Script
from tests.server.support import SPEC_VERSIONS, Call, Stage, chat, settle, staged, text_of

pytestmark = pytest.mark.anyio

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat("x" * 40, max_tokens=100),
    "/v1/completions": {"prompt": "x" * 40, "max_tokens": 100},
}


async def bring_to(stage: Stage, call: Call, state: str) -> None:
    """Step until the request of ``call`` is queued, in the midst of its prompt, or decoding."""
    await settle()
    if state == "queued":
        await stage.step()
        assert stage.engine.queued == 1
    elif state == "prefill":
        await stage.step()
        assert stage.engine.resident == 1
        assert not any(stage.runtime.decodes.values())
    else:
        while stage.runtime.decodes.get(1, 0) < 3:
            await stage.step()


@pytest.mark.parametrize("spec", SPEC_VERSIONS)
@pytest.mark.parametrize("state", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_leaving_ends_the_request(path: str, stream: bool, state: str, spec: str) -> None:
    async with staged(max_batch_size=1, max_step_tokens=8) as stage:
        others = []
        if state == "queued":
            others.append(stage.call("/v1/completions", {"prompt": "y", "max_tokens": 30}))
            await stage.step(2)
        call = stage.call(path, {**ENDPOINTS[path], "stream": stream}, spec=spec)
        await bring_to(stage, call, state)
        assert not call.done

        call.disconnect()
        await settle()
        steps = stage.runtime.steps
        await stage.step()

        assert stage.runtime.steps <= steps + 1
        assert stage.engine.metrics().cancelled == 1
        assert stage.engine.queued == 0
        assert stage.engine.resident == len(others)
        assert call.done
        call.task.result()
        for other in others:
            assert len((await stage.run(other)).json["choices"][0]["text"]) > 0


async def test_a_client_that_leaves_between_body_and_submit_runs_nothing() -> None:
    async with staged() as stage:
        call = stage.call("/v1/completions", {"prompt": "x", "max_tokens": 100})
        call.disconnect()
        await settle()
        await stage.step(3)
        assert call.done
        assert stage.runtime.steps <= 1
        assert stage.engine.resident == 0


async def test_leaving_after_the_end_cancels_nothing() -> None:
    async with staged() as stage:
        call = await stage.ask("/v1/chat/completions", chat(max_tokens=3, stream=True))
        call.disconnect()
        await settle()
        assert stage.engine.metrics().cancelled == 0
        assert stage.engine.metrics().completed == 1


async def test_several_prompts_are_cancelled_together() -> None:
    async with staged() as stage:
        body = {"prompt": ["a", "b", "c"], "max_tokens": 50, "stream": True}
        call = stage.call("/v1/completions", body)
        await settle()
        await stage.step(3)
        assert stage.engine.resident == 3
        call.disconnect()
        await settle()
        await stage.step()
        assert stage.engine.resident == 0
        assert stage.engine.metrics().cancelled == 3


async def test_a_connection_remembers_a_client_that_left_before_it_was_asked() -> None:
    connection, calls = Connection(), []
    connection.on_gone(lambda: calls.append("early"))
    connection.leave()
    connection.leave()
    connection.on_gone(lambda: calls.append("late"))
    assert calls == ["early", "late"]


async def test_a_pause_in_the_stream_does_not_end_it() -> None:
    async with staged(script=Script(length=lambda _: 4)) as stage:
        call = stage.call("/v1/chat/completions", chat(stream=True))
        await settle(500)
        assert call.status == 200
        await stage.run(call)
        assert text_of(call.events).count("<") == 4
