"""P05: requests in the queue whose clients have gone are never served."""

from __future__ import annotations

import pytest

from tests.server.support import chat, settle, staged

pytestmark = pytest.mark.anyio


async def test_the_dead_are_dropped_and_the_living_served() -> None:
    async with staged(max_batch_size=1) as stage:
        first = stage.call("/v1/chat/completions", chat(max_tokens=20))
        await stage.step(2)
        dead = [stage.call("/v1/chat/completions", chat(max_tokens=20)) for _ in range(5)]
        living = stage.call("/v1/chat/completions", chat(max_tokens=3))
        await stage.step()
        assert stage.engine.queued == 6
        for call in dead:
            call.disconnect()
        await settle()
        await stage.step()
        assert stage.engine.queued == 1
        assert stage.engine.pending == 2
        await stage.run(first)
        await stage.run(living)
        served = {request for request, tokens in stage.runtime.prompt_tokens.items() if tokens}
        assert served == {1, 7}
        assert stage.engine.metrics().cancelled == 5
