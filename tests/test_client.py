"""``LocalClient``: an engine as a server sees it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe import (
    ChatTemplateError,
    InvalidRequestError,
    LLMGenerationRequest,
    RequestCancelledError,
    SamplingParams,
    SubmitError,
    UnsupportedRequestError,
)
from steppe.client import LONG_TEXT, LocalClient, ServiceRate
from steppe.errors import EngineFailedError, ExecutionLostError
from steppe.testing import FakeClock, Script
from tests.server.support import Stage, fake_llm, settle, staged, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def request_for(prompt: Any, **params: Any) -> LLMGenerationRequest:
    return LLMGenerationRequest(prompt, params=SamplingParams(**params))


async def test_a_request_gets_its_chunks_and_its_result(tmp_path: Path) -> None:
    with fake_llm(tmp_path) as llm:
        client = LocalClient.of(llm)
        params = SamplingParams(temperature=0, max_tokens=9)
        expected = llm.generate("hello", params)
        handle = await client.submit(LLMGenerationRequest("hello", params=params))
        text = "".join([chunk.text async for chunk in handle])
        assert handle.ready
        assert text == expected.text == (await handle.result()).text

        conversation = [{"role": "user", "content": "hello"}]
        handle = await client.submit(LLMGenerationRequest(messages=conversation, params=params))
        answer = await handle.result()
        assert answer.outputs == llm.chat(conversation, params).outputs

        card = client.card
        assert (card.name, card.context_length) == (llm.name, 256)
        assert card.vocab_size == llm.tokenizer.vocab_size
        assert card.has_chat_template
        assert card.generation_defaults == {"temperature": 0.0}
        assert (await client.metrics()).completed == 4
        assert (await client.health()).ok


async def test_the_engine_is_given_ids_only() -> None:
    async with staged() as stage:
        handle = await stage.client.submit(request_for("abc", max_tokens=2))
        await stage.step(4)
        assert (await handle.result()).usage.prompt_tokens == 3
        with pytest.raises(InvalidRequestError) as caught:
            await stage.client.submit(request_for(""))
        assert caught.value.field == "prompt"


async def test_long_texts_are_read_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(script=Script(context=100_000)) as stage:
        seen: list[int] = []
        encode = stage.tokenizer.encode

        def watched(text: str, **how: Any) -> list[int]:
            seen.append(threading.get_ident())
            return encode(text, **how)

        monkeypatch.setattr(stage.tokenizer, "encode", watched)
        assert await stage.client.tokenize("a" * (LONG_TEXT - 1)) == [97] * (LONG_TEXT - 1)
        assert await stage.client.tokenize("a" * LONG_TEXT) == [97] * LONG_TEXT
        assert seen[0] == threading.get_ident()
        assert seen[1] != threading.get_ident()


async def test_what_is_being_read_counts_as_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(max_pending=2) as stage:
        gate = threading.Event()
        monkeypatch.setattr(stage.tokenizer, "encode", lambda *_, **__: gate.wait() and [1])
        reading = [asyncio.create_task(stage.client.tokenize("a" * LONG_TEXT)) for _ in range(2)]
        await settle()
        try:
            with pytest.raises(SubmitError) as caught:
                stage.client.check_room(1)
        finally:
            gate.set()
        assert caught.value.reason == "backlog_full"
        await asyncio.gather(*reading)
        stage.client.check_room(2)


async def test_room_is_asked_for_without_taking_it() -> None:
    async with staged(max_pending=4) as stage:
        stage.client.check_room(4)
        with pytest.raises(UnsupportedRequestError):
            stage.client.check_room(5)
        handle = await stage.client.submit(request_for("a", n=3, max_tokens=2))
        stage.client.check_room(1)
        with pytest.raises(SubmitError):
            stage.client.check_room(2)
        handle.cancel()
        with pytest.raises(RequestCancelledError):
            await handle.result()


async def test_a_cancelled_task_cancels_its_request() -> None:
    async with staged() as stage:
        handle = await stage.client.submit(request_for("a", max_tokens=100))
        task = asyncio.create_task(handle.result())
        await stage.step(2)
        task.cancel()
        await settle()
        await stage.step()
        assert stage.engine.resident == 0
        assert stage.engine.metrics().cancelled == 1


async def test_cancel_by_id_and_of_everything() -> None:
    async with staged() as stage:
        client = stage.client
        handles = [await client.submit(request_for("a", max_tokens=100)) for _ in range(3)]
        await stage.step(2)
        client.cancel(handles[1].id)
        client.cancel(10**9)
        await stage.step()
        assert stage.engine.resident == 2
        client.cancel_all()
        await stage.step()
        assert stage.engine.resident == 0
        client.cancel_all()


async def test_without_a_template_a_conversation_is_refused() -> None:
    async with staged(chat=False) as stage:
        with pytest.raises(ChatTemplateError):
            await stage.client.encode_chat([{"role": "user", "content": "a"}])


async def test_an_unnamed_token_spells_nothing() -> None:
    async with staged() as stage:
        assert stage.client.token_bytes(65) == b"A"
        assert stage.client.token_bytes(10**6) == b""
        assert await stage.client.detokenize([72, 105]) == "Hi"


async def test_a_drain_closes_the_door_and_finishes_what_runs() -> None:
    async with staged(threaded=True) as stage:
        handle = await stage.client.submit(request_for("a", max_tokens=50))
        await stage.client.drain(30.0)
        assert len((await handle.result()).token_ids) == 50
        assert not stage.client.accepting
        with pytest.raises(SubmitError) as caught:
            stage.client.check_room(1)
        assert caught.value.reason == "shutting_down"
        await stage.client.drain(0.0)


async def test_a_failed_engine_says_why() -> None:
    stage = Stage(script=Script(fail_steps={1: ExecutionLostError("no device")}), threaded=True)
    handle = await stage.client.submit(request_for("a"))
    await until(lambda: handle.ready)
    with pytest.raises(EngineFailedError, match="no device"):
        stage.client.check_room(1)
    await stage.client.drain(1.0)


# ---- how fast requests end -----------------------------------------------------------------------


def test_nothing_measured_is_a_second() -> None:
    clock = FakeClock()
    rate = ServiceRate(clock)
    assert rate.seconds_for(100) == rate.UNKNOWN
    rate.observe(5)
    assert rate.seconds_for(100) == rate.UNKNOWN


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 50)), min_size=1, max_size=60),
    st.floats(0, 1000),
)
def test_any_history_gives_a_sensible_wait(
    history: list[tuple[float, int]], requests: float
) -> None:
    clock = FakeClock()
    rate = ServiceRate(clock)
    ended = 0
    for seconds, more in history:
        clock.advance(seconds)
        ended += more
        rate.observe(ended)
        assert 0.1 <= rate.seconds_for(requests) <= rate.MOST
        assert len(rate._samples) <= rate.WINDOW / rate.SPACING + 3


@given(st.floats(0.2, 10), st.integers(1, 20), st.integers(1, 100))
def test_a_steady_rate_is_found(seconds: float, each: int, requests: int) -> None:
    clock = FakeClock()
    rate = ServiceRate(clock)
    for step in range(10):
        rate.observe(step * each)
        clock.advance(seconds)
    expected = requests * seconds / each
    assert rate.seconds_for(requests) == pytest.approx(max(0.1, min(rate.MOST, expected)))


def test_what_is_long_ago_is_forgotten() -> None:
    clock = FakeClock()
    rate = ServiceRate(clock)
    for ended in range(0, 1000, 100):
        rate.observe(ended)
        clock.advance(1.0)
    clock.advance(100.0)
    rate.observe(1000)
    assert rate.seconds_for(10) == rate.UNKNOWN
    clock.advance(5.0)
    rate.observe(1000)
    assert rate.seconds_for(10) == 5.0  # nothing ended in that time
