"""P58: what does not fit the context is refused with the numbers; what fits is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from steppe.client import LocalClient
from steppe.server.app import create_app
from tests.server.support import ask, fake_llm
from tests.tiny_model import CONTEXT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_the_boundary(tmp_path: Path) -> None:
    with fake_llm(tmp_path) as llm:
        app = create_app(LocalClient.of(llm))
        for length in (CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1):
            for limit in (1, 2, 3):
                for stream in (True, False):
                    body: dict[str, Any] = {
                        "prompt": [65] * length,
                        "max_tokens": limit,
                        "stream": stream,
                    }
                    call = await ask(app, "/v1/completions", body)
                    if length + limit <= CONTEXT:
                        assert call.status == 200
                        continue
                    assert (call.status, call.error["code"]) == (400, "context_length_exceeded")
                    assert str(length) in call.error["message"]
                    assert str(CONTEXT) in call.error["message"]
        assert llm.engine.pending == 0


async def test_a_conversation_is_told_that_its_messages_are_too_long(tmp_path: Path) -> None:
    with fake_llm(tmp_path) as llm:
        app = create_app(LocalClient.of(llm))
        body = {"messages": [{"role": "user", "content": "x" * 2 * CONTEXT}]}
        call = await ask(app, "/v1/chat/completions", body)
        assert (call.status, call.error["code"]) == (400, "context_length_exceeded")
        assert call.error["param"] == "messages"
