"""P28: one key's backlog was everybody's wait."""

from __future__ import annotations

import pytest

from steppe.server.settings import ServerSettings
from tests.server.support import Call, Stage, chat, staged

pytestmark = pytest.mark.anyio

KEYS = ServerSettings(api_keys=("busy", "quiet"))


def ask(stage: Stage, key: str, **fields: object) -> Call:
    return stage.call(
        "/v1/chat/completions",
        chat(max_tokens=4, **fields),
        headers={"authorization": f"Bearer {key}"},
    )


async def order(stage: Stage, calls: list[Call]) -> list[int]:
    """In which order the calls got their answers."""
    ended: list[int] = []
    while len(ended) < len(calls):
        await stage.step()
        ended += [i for i, call in enumerate(calls) if call.done and i not in ended]
    assert all(call.status == 200 for call in calls)
    return ended


@pytest.mark.parametrize("scheduling", ["fcfs", "fair"])
async def test_a_key_with_one_request_does_not_wait_for_one_with_many(scheduling: str) -> None:
    async with staged(settings=KEYS, max_batch_size=1, scheduling=scheduling) as stage:
        calls = [ask(stage, "busy") for _ in range(10)]
        await stage.step(2)
        calls.append(ask(stage, "quiet"))
        place = (await order(stage, calls)).index(10)
        assert place <= 2 if scheduling == "fair" else place == 10


async def test_a_priority_is_kept_lower_first() -> None:
    async with staged(max_batch_size=1, scheduling="fair") as stage:
        first = stage.call("/v1/completions", {"prompt": "a", "max_tokens": 4})
        await stage.step(2)
        calls = [
            stage.call("/v1/completions", {"prompt": "a", "max_tokens": 4, "priority": priority})
            for priority in (5, 0, -5)
        ]
        assert await order(stage, [first, *calls]) == [0, 3, 2, 1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat()),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"model": "scripted", "max_tokens": 3, **chat()}),
        ("/api/generate", {"model": "scripted", "prompt": "a", "options": {"priority": 3}}),
    ],
)
async def test_a_priority_that_would_not_be_kept_is_refused(
    path: str, body: dict[str, object]
) -> None:
    async with staged() as stage:
        fields = body if "options" in body else {**body, "priority": 3}
        call = await stage.ask(path, fields)
        assert call.status == 400
        assert "--scheduling fair" in call.body.decode()
        call = await stage.ask("/v1/completions", {"prompt": "a", "max_tokens": 1, "priority": 0})
        assert call.status == 200
