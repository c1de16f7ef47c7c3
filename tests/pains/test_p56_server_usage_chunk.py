"""P56: the usage chunk comes when asked for, last, with no choices, and never after an error."""

from __future__ import annotations

from typing import Any

import pytest

from steppe.errors import ExecutionError
from steppe.testing import Script
from tests.server.support import chat, settle, staged

pytestmark = pytest.mark.anyio

ENDPOINTS: dict[str, Any] = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"prompt": "hello"},
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_only_when_asked_for(path: str, n: int) -> None:
    body = {**ENDPOINTS[path], "max_tokens": 4, "n": n, "stream": True}
    for options in (None, {}, {"include_usage": False}):
        async with staged() as stage:
            call = await stage.ask(path, {**body, "stream_options": options})
            assert call.events[-1] == "[DONE]"
            assert all("usage" not in one and one["choices"] for one in call.events[:-1])
    async with staged() as stage:
        call = await stage.ask(path, {**body, "stream_options": {"include_usage": True}})
        *chunks, last, done = call.events
        assert done == "[DONE]"
        assert all(one["usage"] is None and one["choices"] for one in chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4 * n
        whole = await stage.ask(path, {**body, "stream": False})
        assert last["usage"] == whole.json["usage"]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_not_after_an_error_or_a_cancel(path: str) -> None:
    body = {
        **ENDPOINTS[path],
        "max_tokens": 50,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with staged(script=Script(fail_steps={6: ExecutionError("broken")})) as stage:
        call = await stage.ask(path, body)
        *chunks, error, done = call.events
        assert done == "[DONE]"
        assert error["error"]["code"] == "generation_failed"
        assert chunks
        assert all(one["usage"] is None for one in chunks)
        assert {choice["finish_reason"] for one in chunks for choice in one["choices"]} == {None}
    async with staged() as stage:
        call = stage.call(path, body)
        await stage.step(4)
        stage.client.cancel(1)
        await settle()
        *chunks, error, done = call.events
        assert done == "[DONE]"
        assert error["error"]["code"] == "request_cancelled"
        reasons = [choice["finish_reason"] for one in chunks for choice in one["choices"]]
        assert set(reasons) == {None}
