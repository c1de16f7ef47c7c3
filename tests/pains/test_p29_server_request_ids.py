"""P29: a client's own request id is a label, whoever else uses it."""

from __future__ import annotations

import pytest

from steppe.server.limits import MAX_LABEL
from tests.server.support import staged

pytestmark = pytest.mark.anyio

SAME = {"x-request-id": "the-same"}


async def test_a_hundred_requests_with_one_label() -> None:
    async with staged(max_batch_size=8, max_pending=100) as stage:
        calls = [
            stage.call(
                "/v1/completions",
                {"prompt": f"prompt {i};", "echo": True, "max_tokens": 5},
                headers=SAME,
            )
            for i in range(100)
        ]
        for i, call in enumerate(calls):
            await stage.run(call)
            assert call.status == 200
            assert call.headers["x-request-id"] == "the-same"
            assert call.json["choices"][0]["text"].startswith(f"prompt {i};<")
        assert len({call.json["id"] for call in calls}) == 100


async def test_a_huge_label_is_cut() -> None:
    async with staged() as stage:
        body = {"prompt": "a", "max_tokens": 2, "stream": True}
        call = await stage.ask("/v1/completions", body, headers={"x-request-id": "x" * 10**6})
        assert call.status == 200
        assert len(call.headers["x-request-id"]) == MAX_LABEL
        assert len(call.body) < 4000
