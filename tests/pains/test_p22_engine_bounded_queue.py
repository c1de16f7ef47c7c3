"""P22: engines refused whenever busy, or deferred without limit. The size is told."""

from __future__ import annotations

import pytest

from steppe.errors import ConfigError, SubmitError
from tests.engine.helpers import ask, run, tick

from .engines import scripted


@pytest.mark.parametrize("waiting", [0, 1, 5])
def test_exactly_so_many_may_wait_beside_the_one_that_runs(waiting: int) -> None:
    with scripted(capacity=1, config={"max_pending_requests": 1 + waiting}) as (engine, _):
        running = engine.submit(ask(3))
        tick(engine)
        assert engine.resident == 1
        queued = [engine.submit(ask(3)) for _ in range(waiting)]
        with pytest.raises(SubmitError) as refusal:
            engine.submit(ask(3))
        assert refusal.value.reason == "backlog_full"
        while not running.ready:
            tick(engine)
        queued.append(engine.submit(ask(3)))
        run(engine)
        assert all(handle.get().token_ids for handle in queued)


def test_an_engine_that_may_hold_nobody_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="max_pending_requests"),
        scripted(config={"max_pending_requests": 0}),
    ):
        pass
