"""P14: a shutdown dropped replies silently. Every accepted request hears of its end."""

from __future__ import annotations

import threading

import pytest

from steppe.engine import ShutdownMode
from steppe.errors import RequestCancelledError
from steppe.testing import Hold
from tests.engine.helpers import ask

from .engines import scripted


@pytest.mark.parametrize(
    ("patience", "endless"), [(None, False), (0, False), (0.01, False), (0, True), (0.01, True)]
)
def test_a_drain_with_too_little_time_cancels_the_rest(
    patience: float | None, endless: bool
) -> None:
    with scripted(manual=False, capacity=8, context=1 << 40) as (engine, _):
        count = 1 << 39 if endless else 20
        handles = [engine.submit(ask(count)) for _ in range(12)]
        engine.shutdown(ShutdownMode.DRAIN, timeout=patience)
        assert all(handle.ready and handle.stream.finished for handle in handles)
        metrics = engine.metrics()
        assert metrics.completed + metrics.cancelled == 12
        if endless:
            assert metrics.cancelled == 12
        elif patience is None:
            assert metrics.completed == 12


def test_streams_and_waiters_are_released_by_a_cancel() -> None:
    hold = Hold()
    with scripted(manual=False, capacity=2, holds={3: hold}, context=1 << 40) as (engine, _):
        handles = [engine.submit(ask(1 << 39)) for _ in range(6)]
        ends: list[object] = []

        def wait(number: int) -> None:
            if number % 2:
                handles[number].stream.consume(lambda chunk: None)
                ends.append(handles[number].stream.finish_reason)
            else:
                with pytest.raises(RequestCancelledError):
                    handles[number].get()
                ends.append(None)

        waiters = [threading.Thread(target=wait, args=(number,)) for number in range(6)]
        for waiter in waiters:
            waiter.start()
        assert hold.entered.wait(10)
        hold.release()
        engine.shutdown(ShutdownMode.CANCEL)
        for waiter in waiters:
            waiter.join(10)
        assert len(ends) == 6
