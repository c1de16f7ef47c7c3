"""P01: a stream whose client has gone must not go on as a ghost."""

from __future__ import annotations

import pytest

from steppe.testing import Script
from tests.server.support import SPEC_VERSIONS, chat, staged

pytestmark = pytest.mark.anyio

BODY = chat(stream=True, max_tokens=400, ignore_eos=True)


@pytest.mark.parametrize("spec", SPEC_VERSIONS)
async def test_a_stream_closed_after_three_chunks_frees_its_seat(spec: str) -> None:
    script = Script(pages=200)
    async with staged(script=script) as stage:
        total = stage.runtime.free_pages
        ghost = stage.call("/v1/chat/completions", BODY, spec=spec)
        other = stage.call("/v1/completions", {"prompt": "y", "max_tokens": 40, "stream": True})
        while len(ghost.events) < 4:
            await stage.step()
        ghost.disconnect()
        await stage.step(2)
        assert stage.engine.resident == 1
        chunks = len(ghost.events)
        await stage.run(other)
        assert len(ghost.events) == chunks
        assert stage.runtime.free_pages == total
        with_company = other.body

    async with staged(script=script) as stage:
        # The same ids as before, so the same script.
        await stage.ask("/v1/completions", {"prompt": "z", "max_tokens": 1})
        body = {"prompt": "y", "max_tokens": 40, "stream": True}
        alone = await stage.ask("/v1/completions", body)

    def texts(data: bytes) -> list[bytes]:
        return [line.partition(b'"choices"')[2] for line in data.split(b"\n\n")]

    assert texts(with_company) == texts(alone.body)
