"""P06: leaving during a long prompt stops it between two chunks."""

from __future__ import annotations

import pytest

from steppe.testing import Script
from tests.server.support import staged

pytestmark = pytest.mark.anyio

CHUNK = 512


@pytest.mark.parametrize("stream", [True, False])
async def test_at_most_one_more_chunk_runs(stream: bool) -> None:
    script = Script(context=40_000)
    async with staged(script=script, max_step_tokens=CHUNK) as stage:
        body = {"prompt": [1] * 32_000, "max_tokens": 10, "stream": stream}
        call = stage.call("/v1/completions", body)
        await stage.step(2)
        assert stage.runtime.prompt_tokens[1] == 2 * CHUNK
        call.disconnect()
        await stage.step(4)
        assert stage.runtime.prompt_tokens[1] <= 3 * CHUNK
        assert stage.engine.resident == 0
