"""P55: a cut answer says ``length``, once per choice, and a stream says what the whole says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from steppe.testing import Script
from tests.server.support import chat, staged, text_of

pytestmark = pytest.mark.anyio

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_the_reason_under_every_limit(tools: Any) -> None:
    end = 5
    for limit in range(1, 8):
        expected = "stop" if limit >= end else "length"
        async with staged(script=Script(length=lambda _: end)) as stage:
            body = chat(max_tokens=limit, n=2, tools=tools)
            whole = await stage.ask("/v1/chat/completions", body)
            reasons = [choice["finish_reason"] for choice in whole.json["choices"]]
            assert reasons == [expected] * 2
        async with staged(script=Script(length=lambda _: end)) as stage:
            call = await stage.ask("/v1/chat/completions", {**body, "stream": True})
            seen: Counter[tuple[int, str]] = Counter()
            for one in call.events[:-1]:
                for choice in one["choices"]:
                    if choice["finish_reason"] is not None:
                        seen[choice["index"], choice["finish_reason"]] += 1
            assert seen == {(0, expected): 1, (1, expected): 1}
            for choice in whole.json["choices"]:
                assert text_of(call.events, choice["index"]) == choice["message"]["content"]
