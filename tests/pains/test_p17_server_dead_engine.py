"""P17: an engine that died or hangs is not called healthy, and its clients are told."""

from __future__ import annotations

import pytest

from steppe.errors import ExecutionLostError
from steppe.testing import Hold, Script
from tests.server.support import chat, staged, until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [True, False])
async def test_a_hung_step_fails_everyone_and_shows(stream: bool) -> None:
    hold = Hold()
    script = Script(holds={3: hold})
    async with staged(script=script, threaded=True, hang_limit=0.4) as stage:
        calls = [stage.call("/v1/chat/completions", chat(stream=stream)) for _ in range(3)]
        await until(lambda: all(call.done for call in calls))
        for call in calls:
            error = call.events[-2]["error"] if stream else call.error
            assert error["code"] == "generation_failed"
            assert "0.4 s" in error["message"]
        for path in ("/ready", "/health"):
            answer = await stage.ask(path)
            assert answer.status == 503
            assert answer.json["engine"] == "failed"
        again = await stage.ask("/v1/chat/completions", chat())
        assert (again.status, again.error["code"]) == (503, "engine_failed")
        hold.release()


async def test_a_lost_device_does_the_same() -> None:
    script = Script(fail_steps={2: ExecutionLostError("the device fell off")})
    async with staged(script=script, threaded=True) as stage:
        call = await stage.ask("/v1/chat/completions", chat())
        assert call.status == 500
        assert "fell off" in call.error["message"]
        assert (await stage.ask("/ready")).status == 503
        again = await stage.ask("/v1/completions", {"prompt": "a"})
        assert again.status == 503
        assert "fell off" in again.error["message"]
