"""The context cache over HTTP: what was reused is in every protocol's usage, salts, metrics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from steppe.client import LocalClient
from steppe.server.app import create_app
from tests.server.support import ask, fake_llm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fastapi import FastAPI

pytestmark = pytest.mark.anyio

LONG = "tell me all about pages, prefixes and prompts"
SYSTEM = "answer briefly and kindly"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[FastAPI]:
    with fake_llm(tmp_path, max_batch_size=4) as llm:
        yield create_app(LocalClient.of(llm))


async def usage(app: FastAPI, path: str, body: dict[str, Any]) -> dict[str, Any]:
    call = await ask(app, path, body)
    assert call.status == 200, call.body
    found: dict[str, Any] = json.loads(call.body)["usage"]
    return found


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": LONG}], "max_tokens": 3, **fields}


async def test_every_protocol_says_what_was_reused(app: FastAPI) -> None:
    first = await usage(app, "/v1/chat/completions", chat())
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    again = await usage(app, "/v1/chat/completions", chat())
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert cached == (again["prompt_tokens"] - 1) // 8 * 8 > 0
    response = await usage(app, "/v1/responses", {"input": LONG, "max_output_tokens": 3})
    assert response["input_tokens_details"]["cached_tokens"] == cached
    message = await usage(
        app,
        "/v1/messages",
        {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": LONG}]},
    )
    assert message["cache_read_input_tokens"] == cached
    assert message["input_tokens"] == again["prompt_tokens"] - cached
    text = {"prompt": LONG, "max_tokens": 3}
    await usage(app, "/v1/completions", text)
    completion = await usage(app, "/v1/completions", text)
    assert completion["prompt_tokens_details"]["cached_tokens"] == (len(LONG) - 1) // 8 * 8


@pytest.mark.parametrize(
    ("path", "body", "details"),
    [
        ("/v1/chat/completions", chat(), "prompt_tokens_details"),
        ("/v1/completions", {"prompt": LONG, "max_tokens": 2}, "prompt_tokens_details"),
        ("/v1/responses", {"input": LONG, "max_output_tokens": 2}, "input_tokens_details"),
    ],
)
async def test_another_salt_finds_nothing(
    app: FastAPI, path: str, body: dict[str, Any], details: str
) -> None:
    await usage(app, path, body)
    salted = {**body, "cache_salt": "tenant"}
    assert (await usage(app, path, salted))[details]["cached_tokens"] == 0
    assert (await usage(app, path, salted))[details]["cached_tokens"] > 0
    for bad in ("", "s" * 257, 7):
        assert (await ask(app, path, {**body, "cache_salt": bad})).status == 400


async def test_metrics_say_what_the_cache_does(app: FastAPI) -> None:
    for _ in range(2):
        found = await usage(app, "/v1/chat/completions", chat())
    page = (await ask(app, "/metrics", method="GET")).body.decode()
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    cached = found["prompt_tokens_details"]["cached_tokens"]
    assert samples["steppe_cache_reused_tokens_total"] == cached
    assert samples["steppe_cache_queried_tokens_total"] == 2 * found["prompt_tokens"]
    assert samples["steppe_cache_hit_rate"] == cached / (2 * found["prompt_tokens"])
    assert samples["steppe_cache_cached_pages"] == samples["steppe_cache_published_pages_total"] > 0
    assert samples["steppe_cache_evicted_pages_total"] == 0
    assert samples["steppe_cache_leased_pages"] == samples["steppe_cache_pinned_pages"] == 0
    assert samples["steppe_cache_total_pages"] > samples["steppe_cache_cached_pages"]
    # The live page is told the same.
    cache = json.loads((await ask(app, "/v1/engine/steps", method="GET")).body)["cache"]
    assert cache["hit_rate"] == samples["steppe_cache_hit_rate"]
    assert cache["cached_pages"] == samples["steppe_cache_cached_pages"]


async def test_conversations_under_a_system_prompt_begin_computed(tmp_path: Path) -> None:
    with fake_llm(tmp_path, max_batch_size=4, system_prompt=SYSTEM) as llm:
        assert llm.pinned_tokens >= len(SYSTEM)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}]
        app = create_app(LocalClient.of(llm))
        found = await usage(app, "/v1/chat/completions", {"messages": messages, "max_tokens": 2})
        assert found["prompt_tokens_details"]["cached_tokens"] == llm.pinned_tokens
