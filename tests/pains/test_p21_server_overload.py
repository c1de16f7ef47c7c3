"""P21: what does not fit is refused at once, with a reason and a time to come back."""

from __future__ import annotations

from typing import Any

import pytest

from steppe.text.tokenizer import Tokenizer
from tests.server.support import chat, settle, staged

pytestmark = pytest.mark.anyio

PENDING = 6


async def test_a_burst_is_refused_beyond_the_bound(monkeypatch: Any) -> None:
    async with staged(max_batch_size=2, max_pending=PENDING) as stage:
        calls = [
            stage.call("/v1/chat/completions", chat(max_tokens=3)) for _ in range(10 * PENDING)
        ]
        await settle()
        assert stage.runtime.steps == 0  # refusing costs no step
        refused = [call for call in calls if call.done]
        assert len(refused) == 9 * PENDING
        for call in refused:
            assert (call.status, call.error["code"]) == (429, "backlog_full")
            assert call.error["type"] == "rate_limit_error"
            assert int(call.headers["retry-after"]) >= 1
        assert stage.engine.pending == PENDING
        for call in calls:
            await stage.run(call)
        assert sum(call.status == 200 for call in calls) == PENDING


async def test_n_counts_n_and_every_prompt_counts() -> None:
    async with staged(max_pending=PENDING) as stage:
        held = stage.call("/v1/completions", {"prompt": "a", "n": 4, "max_tokens": 500})
        await settle()
        for body in ({"prompt": "a", "n": 3}, {"prompt": ["a", "b", "c"]}):
            call = await stage.ask("/v1/completions", body)
            assert call.status == 429
            assert stage.engine.pending == 4
        assert (await stage.ask("/v1/completions", {"prompt": "a", "n": 2})).status == 200
        held.disconnect()
        await settle()


async def test_a_full_server_reads_no_prompt(monkeypatch: Any) -> None:
    async with staged(max_pending=1) as stage:
        held = stage.call("/v1/completions", {"prompt": "a", "max_tokens": 500})
        await settle()
        read: list[str] = []
        # Under every way of reading a text.
        monkeypatch.setattr(Tokenizer, "_encode_plain", lambda self, text: read.append(text) or [1])
        for path, body in (
            ("/v1/completions", {"prompt": "x" * 1000}),
            ("/v1/chat/completions", chat("x" * 1000)),
        ):
            assert (await stage.ask(path, body)).status == 429
        assert read == []
        held.disconnect()
        await settle()


async def test_the_time_to_come_back_is_measured() -> None:
    async with staged(max_batch_size=1, max_pending=8) as stage:
        for _ in range(10):
            call = stage.call("/v1/completions", {"prompt": "a", "max_tokens": 1})
            await settle()
            stage.clock.advance(3.0)
            await stage.run(call)
        calls = [
            stage.call("/v1/completions", {"prompt": "a", "max_tokens": 2000}) for _ in range(9)
        ]
        await settle()
        (refused,) = [call for call in calls if call.done]
        # Three seconds each: half of eight have been served after twelve.
        assert 10 <= int(refused.headers["retry-after"]) <= 14
        assert int(refused.headers["retry-after-ms"]) <= 14000
        for call in calls:
            call.disconnect()
        await settle()


async def test_prompts_that_wait_are_bounded_by_their_tokens() -> None:
    async with staged(max_pending_tokens=100) as stage:
        held = stage.call("/v1/completions", {"prompt": [1] * 90, "max_tokens": 500})
        await settle()
        call = await stage.ask("/v1/completions", {"prompt": [1] * 11})
        assert (call.status, call.error["code"]) == (429, "backlog_full")
        assert int(call.headers["retry-after"]) >= 1
        while stage.engine._shared.pending_tokens:
            await stage.step()
        assert (await stage.ask("/v1/completions", {"prompt": [1] * 11})).status == 200
        held.disconnect()
        await settle()


async def test_prompts_that_can_never_wait_together_are_told_so() -> None:
    async with staged(max_pending_tokens=100) as stage:
        call = await stage.ask("/v1/completions", {"prompt": [[1] * 60, [1] * 60]})
        assert (call.status, call.error["param"]) == (400, "prompt")
        assert "120 tokens in all prompts" in call.error["message"]
        call = await stage.ask("/v1/completions", {"prompt": [[1] * 60, [1] * 40]})
        assert call.status == 200
