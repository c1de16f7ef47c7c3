"""P13: a client that neither reads nor leaves cannot keep its seat for ever."""

from __future__ import annotations

import asyncio

import pytest

from steppe.server.settings import ServerSettings
from tests.server.support import chat, hurry, settle, staged, text_of

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_has_a_deadline_of_the_servers(stream: bool) -> None:
    async with staged(settings=ServerSettings(request_timeout=30.0)) as stage:
        call = stage.call("/v1/chat/completions", chat(max_tokens=2000, stream=stream))
        await stage.step(3)
        assert stage.engine.resident == 1
        stage.clock.advance(31)
        await stage.step(2)
        assert stage.engine.resident == 0
        assert stage.engine.metrics().expired == 1
        assert call.done
        error = call.events[-2]["error"] if stream else call.error
        assert error["code"] == "request_timeout"
        assert call.status == (200 if stream else 504)


async def test_a_wait_has_one_too() -> None:
    settings = ServerSettings(queue_timeout=5.0)
    async with staged(settings=settings, max_batch_size=1) as stage:
        first = stage.call("/v1/chat/completions", chat(max_tokens=1000))
        await stage.step(2)
        late = stage.call("/v1/chat/completions", chat(max_tokens=2))
        await stage.step()
        stage.clock.advance(6)
        await stage.step()
        assert (late.status, late.error["code"]) == (503, "queue_timeout")
        assert int(late.headers["retry-after"]) >= 1
        first.disconnect()
        await settle()


async def test_a_deaf_client_is_given_up_when_its_time_is_over() -> None:
    async with staged(settings=ServerSettings(write_timeout=60.0)) as stage:
        call = stage.call("/v1/chat/completions", chat(max_tokens=2000, stream=True), deaf=2)
        other = stage.call("/v1/chat/completions", chat(max_tokens=200, stream=True))
        await stage.step(10)
        hurry(59)
        await asyncio.sleep(0.001)
        await stage.step(10)
        assert stage.engine.resident == 2
        hurry(2)
        await asyncio.sleep(0.001)
        await stage.step(2)
        assert call.done
        assert stage.engine.resident == 1
        assert stage.engine.metrics().cancelled == 1
        # Nobody else is given less, or later.
        assert text_of((await stage.run(other)).events).count("<") == 200


async def test_a_deaf_client_that_may_come_back_is_given_its_time_and_no_more() -> None:
    async with staged(settings=ServerSettings(write_timeout=60.0)) as stage:
        call = stage.call(
            "/v1/chat/completions",
            chat(max_tokens=2000, stream=True),
            deaf=2,
            headers={"x-steppe-resume": "30"},
        )
        await stage.step(10)
        for seconds, resident in ((61, 1), (29, 1), (2, 0)):
            hurry(seconds)
            await asyncio.sleep(0.001)
            await stage.step(2)
            assert call.done
            assert stage.engine.resident == resident
