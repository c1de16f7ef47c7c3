"""What the page is told of the engine, and its cancel button."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from steppe.server.settings import ServerSettings
from steppe.testing import Script
from tests.server.support import chat, staged

if TYPE_CHECKING:
    from tests.server.support import Stage

pytestmark = pytest.mark.anyio


async def look(stage: Stage, after: int = 0) -> dict[str, Any]:
    answer = (await stage.ask("/v1/engine/steps", query=f"after={after}")).json
    assert answer["object"] == "engine.activity"
    return answer


async def test_steps_are_told_from_the_second_look_on() -> None:
    async with staged(max_step_tokens=8) as stage:
        first = await stage.ask("/v1/completions", {"prompt": "a" * 5, "max_tokens": 2})
        assert first.status == 200
        assert (await look(stage))["steps"] == []
        call = stage.call("/v1/completions", {"prompt": "b" * 20, "max_tokens": 3})
        await stage.run(call)
        answer = await look(stage)
        steps = answer["steps"]
        assert [one["number"] for one in steps] == list(
            range(steps[0]["number"], steps[0]["number"] + len(steps))
        )
        (ident,) = {id for one in steps for id, _ in one["prefills"]}
        assert [one["prefills"] for one in steps if one["prefills"]] == [
            [[ident, 8]], [[ident, 8]], [[ident, 4]],
        ]  # fmt: skip
        assert sum(one["decodes"].count(ident) for one in steps) == 2
        assert sum(one["tokens"] for one in steps) == 3
        assert [id for one in steps for id, _ in one["first_tokens"]] == [ident]
        assert answer["counters"]["steps"] == steps[-1]["number"]
        assert answer["counters"]["tokens"] == 5
        assert answer["live"] == []
        assert (await look(stage, steps[-1]["number"]))["steps"] == []
        assert (await look(stage, steps[-2]["number"]))["steps"] == steps[-1:]


async def test_who_sits_and_who_waits() -> None:
    async with staged(max_batch_size=1) as stage:
        calls = [
            stage.call("/v1/chat/completions", chat("x" * 7, max_tokens=9, stream=True))
            for _ in range(2)
        ]
        await stage.step(3)
        stage.clock.advance(2.0)
        answer = await look(stage)
        seated, waiting = answer["live"]
        assert seated["seat"] == 0
        assert waiting["seat"] is None
        assert (seated["age"], waiting["age"]) == (2.0, 2.0)
        assert (seated["tokens"], waiting["tokens"]) == (3, 0)
        assert seated["max_tokens"] == 9
        assert seated["prompt_tokens"] == waiting["prompt_tokens"] > 7
        assert (answer["resident"], answer["queued"], answer["seats"]) == (1, 1, 1)
        for call in calls:
            await stage.run(call)
        assert (await look(stage))["live"] == []


async def test_first_tokens_say_how_long_they_were_waited_for() -> None:
    async with staged() as stage:
        await look(stage)
        call = stage.call("/v1/completions", {"prompt": "ab", "max_tokens": 2})
        await stage.step(0)
        stage.clock.advance(1.5)
        await stage.run(call)
        waits = [wait for one in (await look(stage))["steps"] for _, wait in one["first_tokens"]]
        assert waits == [1.5]


async def test_a_request_is_cancelled_by_its_id_wherever_it_is() -> None:
    async with staged(max_batch_size=1) as stage:
        running, waiting = (
            stage.call("/v1/completions", {"prompt": "ab", "max_tokens": 50, "stream": True})
            for _ in range(2)
        )
        await stage.step(2)
        first, second = (one["request_id"] for one in (await look(stage))["live"])
        for ident, call in ((second, waiting), (first, running)):
            answer = await stage.ask(f"/v1/engine/requests/{ident}", method="DELETE")
            assert answer.status == 200
            assert answer.json == {"id": ident, "object": "engine.request", "cancelled": True}
            await stage.run(call)
            assert call.events[-2]["error"]["code"] == "request_cancelled"
        await stage.step(2)
        again = await stage.ask(f"/v1/engine/requests/{first}", method="DELETE")
        assert (again.status, again.error["code"]) == (404, "request_not_found")
        assert stage.engine.metrics().cancelled == 2


async def test_the_ids_of_several_sequences_lead_to_one_request() -> None:
    async with staged() as stage:
        call = stage.call("/v1/completions", {"prompt": "ab", "max_tokens": 50, "n": 3})
        await stage.step(2)
        live = (await look(stage))["live"]
        assert len({one["id"] for one in live}) == 3
        (ident,) = {one["request_id"] for one in live}
        await stage.ask(f"/v1/engine/requests/{ident}", method="DELETE")
        await stage.run(call)
        assert call.status == 499


async def test_a_key_is_needed_to_look_and_to_cancel() -> None:
    async with staged(settings=ServerSettings(api_keys=("secret",))) as stage:
        for path, method in (("/v1/engine/steps", "GET"), ("/v1/engine/requests/1", "DELETE")):
            assert (await stage.ask(path, method=method)).status == 401
            headers = {"authorization": "Bearer secret"}
            answer = await stage.ask(path, method=method, headers=headers)
            assert answer.status in (200, 404)


async def test_memory_is_told_in_pages_and_in_tokens() -> None:
    async with staged(script=Script(pages=10, page_size=4)) as stage:
        await look(stage)
        await stage.ask("/v1/completions", {"prompt": "x" * 8, "max_tokens": 4})
        answer = await look(stage)
        assert {one["page_size"] for one in answer["steps"]} == {4}
        assert all(0 <= one["free_pages"] < 10 for one in answer["steps"])
        assert answer["cache_tokens"] == 40


@pytest.mark.parametrize("query", ["after=-1", "after=x", "limit=-1", "limit=99999"])
async def test_a_wrong_query_is_named(query: str) -> None:
    async with staged() as stage:
        call = await stage.ask("/v1/engine/steps", query=query)
        assert (call.status, call.error["param"]) == (400, query.partition("=")[0])


async def test_the_newest_steps_come_when_there_are_too_many() -> None:
    async with staged() as stage:
        await look(stage)
        await stage.ask("/v1/completions", {"prompt": "ab", "max_tokens": 12})
        everything = (await look(stage))["steps"]
        limited = (await stage.ask("/v1/engine/steps", query="limit=3")).json["steps"]
        assert limited == everything[-3:]
        assert (await stage.ask("/v1/engine/steps", query="limit=0")).json["steps"] == []
