"""P61: an idle engine burned a core."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from steppe.engine import EngineConfig, RequestEngine
from steppe.testing import ScriptedRuntime
from tests.engine.helpers import ask


def test_every_source_of_work_wakes_an_engine_that_would_sleep_for_an_hour() -> None:
    with RequestEngine(ScriptedRuntime(), EngineConfig(idle_wait=3600.0)) as engine:
        assert engine.submit(ask(2)).get(10).token_ids
        assert engine.submit(ask(2)).get(10).token_ids
    # And so did the end of the block.


ROOT = Path(__file__).parents[2]

IDLE = """
import time
from steppe.engine import RequestEngine
from steppe.testing import ScriptedRuntime
from tests.engine.helpers import ask

with RequestEngine(ScriptedRuntime()) as engine:
    engine.submit(ask(1, timeout=1e6)).get(10)
    before = time.process_time()
    time.sleep(5)
    print(time.process_time() - before)
"""


@pytest.mark.slow
def test_five_idle_seconds_cost_less_than_fifty_milliseconds() -> None:
    """In a process of its own: what other tests have left running here is not the engine's."""
    command = [sys.executable, "-c", IDLE]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert 0 <= float(ran.stdout) < 0.05
