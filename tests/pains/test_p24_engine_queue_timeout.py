"""P24: a queue limit was looked at only when the running request ended."""

from __future__ import annotations

import pytest

from steppe.errors import DeadlineExceededError
from steppe.testing import FakeClock, Hold
from tests.engine.helpers import ask

from .engines import scripted


def test_an_expired_waiter_is_answered_while_a_step_hangs() -> None:
    clock, hold = FakeClock(), Hold()
    config = {"clock": clock, "idle_wait": 0.001}
    with scripted(manual=False, capacity=1, holds={2: hold}, config=config) as (engine, runtime):
        running = engine.submit(ask(9, timeout=50.0))
        waiting = engine.submit(ask(9, queue_timeout=1.0))
        patient = engine.submit(ask(2, queue_timeout=500.0))
        assert hold.entered.wait(10)
        clock.advance(2.0)
        with pytest.raises(DeadlineExceededError, match="queue"):
            waiting.get(10)
        assert not running.ready
        clock.advance(50.0)
        with pytest.raises(DeadlineExceededError, match="total"):
            running.get(10)
        assert not patient.ready, "the step still hangs, and this one has time"
        hold.release()
        assert patient.get(10).token_ids
        assert waiting.id not in runtime.attempts
