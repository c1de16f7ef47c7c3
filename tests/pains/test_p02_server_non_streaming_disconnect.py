"""P02: a plain answer is cancelled like a stream when its client has gone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.support import SPEC_VERSIONS, chat, staged

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("spec", SPEC_VERSIONS)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(max_tokens=2000)),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2000}),
        ("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 2000, "n": 2}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2000}),
        ("/v1/messages", {"model": "scripted", **chat(max_tokens=2000)}),
        ("/api/chat", {"model": "scripted", **chat(stream=False)}),
        ("/api/generate", {"model": "scripted", "prompt": "x", "stream": False}),
    ],
)
async def test_a_plain_answer_ends_with_its_client(path: str, body: Any, spec: str) -> None:
    async with staged() as stage:
        call = stage.call(path, body, spec=spec)
        await stage.step(5)
        assert stage.engine.resident
        call.disconnect()
        await stage.step()
        assert stage.engine.resident == 0
        assert stage.engine.metrics().completed == 0
        assert call.done


@pytest.mark.parametrize("spec", SPEC_VERSIONS)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x" * 60}),
        ("/api/embed", {"model": "scripted", "input": "x" * 60}),
    ],
)
async def test_an_embedding_ends_with_its_client(path: str, body: Any, spec: str) -> None:
    async with staged(max_step_tokens=4) as stage:
        call = stage.call(path, body, spec=spec)
        await stage.step(3)
        assert stage.engine.resident
        call.disconnect()
        await stage.step()
        assert stage.engine.resident == 0
        assert stage.engine.metrics().cancelled == 1
        assert call.done
