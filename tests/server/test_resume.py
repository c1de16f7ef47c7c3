"""Streams that outlive their connection: whatever the moment, nothing is lost and nothing stays."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from steppe.errors import ConfigError
from steppe.server.resume import ASKED, TOKEN
from steppe.server.settings import ServerSettings
from tests.server.support import (
    SPEC_VERSIONS,
    Call,
    Stage,
    chat,
    hurry,
    settle,
    staged,
    text_of,
    until,
)
from tests.server.test_disconnect import bring_to

if TYPE_CHECKING:
    import numpy as np

    from tests.server.conftest import Live

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
TOKENS = 20
USAGE = {"include_usage": True}


def begin(stage: Stage, seconds: str = "30", *, spec: str = "2.3", **headers: str) -> Call:
    """A stream that may be resumed."""
    body = chat("x" * 40, max_tokens=TOKENS, stream=True, stream_options=USAGE)
    return stage.call(PATH, body, headers={ASKED: seconds, **headers}, spec=spec)


def again(stage: Stage, token: str, after: int | str | None = None, **headers: str) -> Call:
    """Come back to a stream."""
    last = {} if after is None else {"last-event-id": str(after)}
    return stage.call(f"/v1/streams/{token}", headers={**last, **headers})


def numbered(call: Call) -> list[tuple[int, Any]]:
    """(id, data) of each event so far."""
    events = []
    for block in call.body.decode().split("\n\n"):
        if block and not block.startswith(":"):
            first, second = block.split("\n")
            data = second.removeprefix("data: ")
            number = int(first.removeprefix("id: "))
            events.append((number, data if data == "[DONE]" else json.loads(data)))
    return events


async def uninterrupted() -> list[Any]:
    """The events of the same request from beginning to end."""
    async with staged(max_batch_size=1, max_step_tokens=8) as stage:
        call = await stage.run(begin(stage))
        return [data for _, data in numbered(call)]


def check_whole(events: list[tuple[int, Any]], whole: list[Any]) -> None:
    """Nothing is missing and nothing came twice, however the text was cut into events."""
    assert [number for number, _ in events] == list(range(1, len(events) + 1))
    received = [data for _, data in events]
    assert text_of(received) == text_of(whole)
    assert text_of(received).count("<") == TOKENS
    assert received[-2]["usage"]["completion_tokens"] == TOKENS
    assert received[-1] == "[DONE]"
    ends = [c["finish_reason"] for one in received[:-1] for c in one["choices"]]
    assert [end for end in ends if end] == ["length"]


@pytest.mark.parametrize("spec", SPEC_VERSIONS)
@pytest.mark.parametrize("state", ["queued", "prefill", "decode", "finished"])
async def test_a_stream_goes_on_where_it_was_lost(state: str, spec: str) -> None:
    whole = await uninterrupted()
    async with staged(max_batch_size=1, max_step_tokens=8) as stage:
        other = None
        if state == "queued":
            other = stage.call("/v1/completions", {"prompt": "y", "max_tokens": 30})
            await stage.step(2)
        call = begin(stage, spec=spec)
        await bring_to(stage, call, "decode" if state == "finished" else state)
        received = numbered(call)
        token = call.headers[TOKEN]
        assert call.headers[ASKED] == "30"
        call.disconnect()
        await settle()
        assert call.done
        await stage.step(40 if state == "finished" else 2)
        assert stage.engine.metrics().cancelled == 0
        assert (stage.engine.pending == 0) == (state == "finished")

        after = received[-1][0] if received else 0
        back = await stage.run(again(stage, token, after, accept="text/event-stream"))
        assert (back.status, back.headers[TOKEN]) == (200, token)
        assert back.headers["content-type"].startswith("text/event-stream")
        if other is not None:
            await stage.run(other)
        # What is said depends on who says it: only the engine's first request is the same again.
        everything = received + numbered(back)
        check_whole(everything, whole if other is None else [data for _, data in everything])
        assert stage.engine.metrics().cancelled == 0


async def test_a_client_may_leave_as_often_as_it_likes(rng: np.random.Generator) -> None:
    whole = await uninterrupted()
    async with staged(max_batch_size=1, max_step_tokens=8) as stage:
        call = begin(stage)
        await settle()
        token, received = call.headers[TOKEN], []
        while not call.done:
            await stage.step(int(rng.integers(0, 5)))
            if rng.random() < 0.7 and not call.done:
                call.disconnect()
                await stage.step(int(rng.integers(0, 3)))
                # What was on its way may or may not have arrived.
                got = numbered(call)
                received += got[: int(rng.integers(0, len(got) + 1))]
                hurry(20)  # less than it is given, each time
                call = again(stage, token, received[-1][0] if received else None)
                await settle()
                assert call.status == 200
        received += numbered(call)
        check_whole(received, whole)


async def test_without_the_header_there_are_no_ids_and_leaving_is_the_end() -> None:
    async with staged() as stage:
        call = stage.call(PATH, chat(stream=True, max_tokens=50))
        await stage.step(3)
        assert TOKEN not in call.headers
        assert b"id: " not in call.body
        call.disconnect()
        await stage.step(2)
        assert stage.engine.metrics().cancelled == 1


@pytest.mark.parametrize("state", ["queued", "prefill", "decode", "finished"])
async def test_whoever_does_not_come_back_in_time_is_cancelled(state: str) -> None:
    async with staged(max_batch_size=1, max_step_tokens=8) as stage:
        if state == "queued":
            other = stage.call("/v1/completions", {"prompt": "y", "max_tokens": 30})
            await stage.step(2)
        call = begin(stage)
        await bring_to(stage, call, "decode" if state == "finished" else state)
        if state == "finished":
            await stage.run(call)
        else:
            call.disconnect()
        await settle()
        hurry(29)
        await asyncio.sleep(0.01)
        await stage.step()
        streams = stage.app.state.serving.streams
        assert len(streams) == 1
        assert stage.engine.metrics().cancelled == 0
        hurry(2)
        await asyncio.sleep(0.01)
        await stage.step()
        assert len(streams) == 0
        assert stage.engine.metrics().cancelled == (state != "finished")
        back = await stage.run(again(stage, call.headers[TOKEN], 0))
        assert (back.status, back.error["code"]) == (404, "stream_not_found")
        if state == "queued":
            await stage.run(other)


async def test_whoever_reads_is_not_hurried() -> None:
    async with staged() as stage:
        call = begin(stage)
        await stage.step(3)
        call.disconnect()
        await settle()
        back = again(stage, call.headers[TOKEN], numbered(call)[-1][0])
        await settle()
        hurry(1000)
        await asyncio.sleep(0.01)
        await stage.run(back)
        assert numbered(back)[-1][1] == "[DONE]"
        assert stage.engine.metrics().completed == 1


async def test_there_is_one_reader_at_a_time() -> None:
    async with staged() as stage:
        call = begin(stage)
        await stage.step(3)
        token = call.headers[TOKEN]
        second = await stage.run(again(stage, token, 0))
        assert (second.status, second.error["code"]) == (409, "stream_in_use")
        await stage.run(call)
        assert numbered(call)[-1][1] == "[DONE]"
        # The whole of it may be read once more, until its time is over.
        third = await stage.run(again(stage, token))
        assert third.body == call.body


async def test_ids_that_are_none() -> None:
    async with staged() as stage:
        call = begin(stage)
        await stage.step(3)
        call.disconnect()
        await settle()
        token = call.headers[TOKEN]
        back = await stage.run(again(stage, token, 10_000))
        assert (back.status, back.error["param"]) == (400, "last-event-id")
        for wrong in ("x", "-1", "1.5", "9" * 30):
            back = await stage.run(again(stage, token, wrong))
            assert (back.status, back.error["param"]) == (400, "last-event-id")
        for unknown in ("nobody", token[:-1], "x" * 100):
            back = await stage.run(again(stage, unknown, 0))
            assert back.status in (400, 404)
        assert stage.engine.metrics().cancelled == 0


async def test_a_stream_belongs_to_its_key() -> None:
    async with staged(settings=ServerSettings(api_keys=("one", "two"))) as stage:
        call = begin(stage, authorization="Bearer one")
        await stage.step(3)
        call.disconnect()
        await settle()
        token = call.headers[TOKEN]
        assert (await stage.run(again(stage, token, 0))).status == 401
        back = await stage.run(again(stage, token, 0, authorization="Bearer two"))
        assert (back.status, back.error["code"]) == (404, "stream_not_found")
        back = await stage.run(again(stage, token, 0, **{"x-api-key": "one"}))
        assert numbered(back)[-1] == (len(numbered(back)), "[DONE]")


async def test_what_nobody_was_sent_is_bounded_and_never_dropped() -> None:
    limit = 1500
    async with staged(settings=ServerSettings(resume_buffer=limit)) as stage:
        body = chat(max_tokens=300, stream=True)
        call = stage.call(PATH, body, headers={ASKED: "30"})
        await stage.step(3)
        call.disconnect()
        await settle()
        while stage.engine.pending:
            await stage.step()
        (stream,) = stage.app.state.serving.streams._streams.values()
        assert sum(map(len, stream._log)) < 2 * limit + 600
        assert stage.engine.metrics().completed == 1
        received = numbered(call)
        back = await stage.run(again(stage, call.headers[TOKEN], received[-1][0]))
        received += numbered(back)
        assert [number for number, _ in received] == list(range(1, len(received) + 1))
        assert text_of([data for _, data in received]).count("<") == 300
        assert len(received) < 100  # merged, while there was no room
        # What was sent long ago is the price of the bound.
        late = await stage.run(again(stage, call.headers[TOKEN], 1))
        assert (late.status, late.error["code"]) == (410, "events_gone")


@pytest.mark.parametrize("asked", ["", "soon", "0", "-1", "nan", "inf"])
async def test_a_header_that_asks_badly_is_refused(asked: str) -> None:
    async with staged() as stage:
        call = await stage.run(begin(stage, asked))
        assert (call.status, call.error["param"]) == (400, ASKED)
        assert stage.runtime.steps == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, chat()),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/api/chat", {"model": "scripted", "messages": [{"role": "user", "content": "a"}]}),
        ("/api/generate", {"model": "scripted", "prompt": "a", "raw": True}),
    ],
)
async def test_what_is_no_stream_of_events_cannot_be_resumed(path: str, body: Any) -> None:
    async with staged() as stage:
        call = await stage.ask(path, body, headers={ASKED: "3"})
        assert call.status == 400
        assert ASKED in call.body.decode()


async def test_the_server_has_the_last_word() -> None:
    async with staged(settings=ServerSettings(max_resume=9.5)) as stage:
        call = await stage.run(begin(stage, "1e6"))
        assert call.headers[ASKED] == "9.5"
    async with staged(settings=ServerSettings(max_resume=0)) as stage:
        call = await stage.run(begin(stage))
        assert (call.status, call.error["code"]) == (400, "unsupported_value")
    for field, value in (("max_resume", -1.0), ("resume_buffer", 0)):
        with pytest.raises(ConfigError) as caught:
            ServerSettings(**{field: value})
        assert caught.value.field == field


async def test_streams_are_no_more_than_there_are_places() -> None:
    async with staged(max_pending=2, max_batch_size=2) as stage:
        finished = [await stage.run(begin(stage)) for _ in range(4)]
        running = [begin(stage), begin(stage)]
        await stage.step()
        # Two made room, which had been sent everything.
        assert [one.status for one in running] == [200, 200]
        streams = stage.app.state.serving.streams
        assert len(streams) == 4
        gone = await stage.run(again(stage, finished[0].headers[TOKEN], 0))
        assert gone.status == 404
        for one in running:
            one.disconnect()
        while stage.engine.pending:
            await stage.step()
        # Two that nobody has read to the end keep their places.
        more = [begin(stage), begin(stage)]
        await stage.step(2)
        for one in more:
            one.disconnect()
        while stage.engine.pending:
            await stage.step()
        refused = await stage.run(begin(stage))
        assert (refused.status, refused.error["code"]) == (429, "resume_full")
        assert int(refused.headers["retry-after"]) >= 1


async def test_a_shutdown_ends_them_with_their_last_event() -> None:
    async with staged(threaded=True) as stage:
        call = stage.call(PATH, chat(max_tokens=2000, stream=True), headers={ASKED: "30"})
        await until(lambda: bool(call.body))
        call.disconnect()
        await settle()
        await stage.client.drain(0)
        back = await stage.run(again(stage, call.headers[TOKEN], 0))
        events = [data for _, data in numbered(back)]
        assert events[-1] == "[DONE]"
        assert "error" in events[-2] or events[-2]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
async def test_every_stream_of_events_can_be_resumed(path: str) -> None:
    asked = {
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "model": "scripted"},
    }[path]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    async with staged() as stage:
        body = {**asked, limit: 5, "stream": True}
        call = stage.call(path, body, headers={ASKED: "30"})
        await stage.step(3)
        call.disconnect()
        await settle()
        back = await stage.run(again(stage, call.headers[TOKEN]))
        text = back.body.decode()
        assert text.startswith(call.body.decode())
        ids = [int(line[4:]) for line in text.split("\n") if line.startswith("id: ")]
        assert ids == list(range(1, text.count("\n\n") + 1))


def test_a_real_client_comes_back(live: Live) -> None:
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello there."}],
        "max_tokens": 30,
    }
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**ask).choices[0].message.content
        raw = client.chat.completions.with_raw_response.create(
            **ask, stream=True, extra_headers={ASKED: "20"}
        )
        token = raw.headers[TOKEN]
        text = ""
        with raw.parse() as stream:
            for count, chunk in enumerate(stream, start=1):
                text += chunk.choices[0].delta.content or ""
                if count == 4:
                    break
    for _ in range(100):
        answer = httpx.get(f"{live.url}/v1/streams/{token}", headers={"last-event-id": "4"})
        if answer.status_code != 409:  # that the first connection is gone is not seen at once
            break
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
    assert text == whole
