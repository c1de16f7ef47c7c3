"""P10: cancelling with logprobs crashed. Whatever rides along, a cancel is a cancel."""

from __future__ import annotations

import pytest

from steppe.errors import RequestCancelledError
from tests.engine.helpers import ask, chunks, run, tick

from .engines import scripted


@pytest.mark.parametrize("ticks", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("extra", [{"logprobs": 5}, {"n": 2}, {"n": 3, "logprobs": 0}])
def test_cancel_matrix(ticks: int, burst: int, extra: dict[str, int]) -> None:
    with scripted(capacity=2, burst=lambda one, turn: (one + turn) % (burst + 1)) as (engine, _):
        handle = engine.submit(ask(60, **extra))
        tick(engine, ticks)
        handle.cancel()
        run(engine)
        with pytest.raises(RequestCancelledError):
            handle.get()
        for chunk in chunks(handle):
            if "logprobs" in extra and chunk.token_ids:
                assert chunk.logprobs is not None
                assert len(chunk.logprobs) == len(chunk.token_ids)
        assert engine.metrics().cancelled == 1
