"""How events are written, and what a reader that does not read brings on itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.server.settings import ServerSettings
from steppe.server.sse import event
from steppe.testing import Script
from tests.server.support import SPEC_VERSIONS, chat, settle, staged, until

if TYPE_CHECKING:
    from tests.server.support import Call, Stage

pytestmark = pytest.mark.anyio


@given(st.recursive(st.none() | st.text() | st.integers(), st.lists, max_leaves=5))
async def test_an_event_is_one_line_of_json(value: object) -> None:
    data = event(value)
    assert data.endswith(b"\n\n")
    head, _, rest = data.decode("utf-8", "surrogatepass").partition(": ")
    assert head == "data"
    assert rest.count("\n") == 2
    # Other line ends that a text may hold are no line ends of the protocol if they are escaped.
    assert "\r" not in rest
    assert json.loads(rest) == value
    assert event(value, "delta").startswith(b"event: delta\ndata: ")


async def stalled(stage: Stage, call: Call) -> None:
    """Step until the server has let go of a call."""

    def stepped() -> bool:
        stage.engine.tick()
        return call.done

    await until(stepped)


@pytest.mark.parametrize("spec", SPEC_VERSIONS)
async def test_a_reader_that_takes_nothing_is_given_up(spec: str) -> None:
    settings = ServerSettings(write_timeout=0.05)
    async with staged(settings=settings) as stage:
        call = stage.call("/v1/chat/completions", chat(stream=True), spec=spec, deaf=3)
        other = stage.call("/v1/chat/completions", chat(stream=True, max_tokens=5))
        await stalled(stage, call)
        await stage.step()
        assert stage.engine.resident == 0
        assert stage.engine.metrics().cancelled == 1
        assert other.events[-1] == "[DONE]"


async def test_a_reader_that_takes_nothing_is_given_up_while_its_request_waits() -> None:
    settings = ServerSettings(write_timeout=0.02, ping_interval=0.02)
    async with staged(settings=settings, max_batch_size=1) as stage:
        first = stage.call("/v1/completions", {"prompt": "a", "max_tokens": 2000})
        await stage.step()
        call = stage.call("/v1/chat/completions", chat(stream=True), deaf=1)
        await stage.step()
        assert stage.engine.queued == 1
        await until(lambda: call.done)
        await stage.step()
        assert stage.engine.queued == 0
        first.disconnect()
        await settle()


async def test_a_whole_answer_that_nobody_takes_is_given_up() -> None:
    async with staged(settings=ServerSettings(write_timeout=0.02)) as stage:
        call = stage.call("/v1/chat/completions", chat(max_tokens=2), deaf=0)
        await stalled(stage, call)
        assert stage.engine.metrics().completed == 1


async def test_a_silent_stream_is_kept_alive_by_comments() -> None:
    async with staged(settings=ServerSettings(ping_interval=0.01)) as stage:
        call = stage.call("/v1/chat/completions", chat(stream=True, max_tokens=2))
        await until(lambda: call.body.count(b": still here\n\n") >= 3)
        assert call.events == []
        await stage.run(call)
        assert call.events[-1] == "[DONE]"


async def test_headers_keep_proxies_from_holding_events_back() -> None:
    async with staged(script=Script(length=lambda _: 1)) as stage:
        call = await stage.ask("/v1/chat/completions", chat(stream=True))
        assert call.headers["cache-control"] == "no-store"
        assert call.headers["x-accel-buffering"] == "no"
        assert "content-length" not in call.headers
        assert [message["more_body"] for message in call.messages[1:]][-1] is False
