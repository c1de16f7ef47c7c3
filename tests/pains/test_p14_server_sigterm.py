"""P14: a shutdown tells every client how its request ended. (The signal itself is tested with a
real process in tests/server/test_lifecycle.py.)"""

from __future__ import annotations

import asyncio

import pytest

from steppe.testing import Hold, Script
from tests.server.support import chat, settle, staged, until

pytestmark = pytest.mark.anyio

ACTIVE, WAITING = 8, 4


@pytest.mark.parametrize("patience", [0.0, 0.05, 60.0])
@pytest.mark.parametrize("stream", [True, False])
async def test_every_stream_gets_its_last_event(patience: float, stream: bool) -> None:
    hold = Hold()
    script = Script(capacity=ACTIVE, holds={5: hold})
    async with staged(script=script, threaded=True, max_batch_size=ACTIVE) as stage:
        body = chat(stream=stream, max_tokens=20)
        calls = [stage.call("/v1/chat/completions", body) for _ in range(ACTIVE + WAITING)]
        await until(hold.entered.is_set)
        drain = asyncio.create_task(stage.client.drain(patience))
        await until(lambda: not stage.client.accepting)
        if patience < 1:
            await asyncio.sleep(2 * patience + 0.02)

        late = stage.call("/v1/chat/completions", body)
        ready = stage.call("/ready")
        await settle()
        assert (late.status, late.error["code"]) == (503, "shutting_down")
        assert int(late.headers["retry-after"]) >= 1
        assert ready.status == 503

        hold.release()
        await drain
        await until(lambda: all(call.done for call in calls))
        finished = cut = 0
        for call in calls:
            if stream:
                assert call.status == 200
                assert call.events[-1] == "[DONE]"
                last = call.events[-2]
            else:
                last = call.json
            if "error" in last:
                cut += 1
                assert last["error"]["code"] == "shutting_down"
            else:
                finished += 1
                assert last["choices"][0]["finish_reason"] == "length"
        assert finished + cut == ACTIVE + WAITING
        assert cut == 0 if patience > 1 else finished == 0
