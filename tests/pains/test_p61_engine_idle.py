"""P61: an idle engine burned a core."""

from __future__ import annotations

import time

import pytest

from steppe.engine import EngineConfig, RequestEngine
from steppe.testing import ScriptedRuntime
from tests.engine.helpers import ask


def test_every_source_of_work_wakes_an_engine_that_would_sleep_for_an_hour() -> None:
    with RequestEngine(ScriptedRuntime(), EngineConfig(idle_wait=3600.0)) as engine:
        assert engine.submit(ask(2)).get(10).token_ids
        assert engine.submit(ask(2)).get(10).token_ids
    # And so did the end of the block.


@pytest.mark.slow
def test_five_idle_seconds_cost_less_than_fifty_milliseconds() -> None:
    with RequestEngine(ScriptedRuntime()) as engine:
        engine.submit(ask(1, timeout=1e6)).get(10)
        before = time.process_time()
        time.sleep(5)
        assert time.process_time() - before < 0.05
