"""P21: overload became waiting without end. Full is an answer, at once, and costs nothing."""

from __future__ import annotations

import pytest

from steppe.errors import SubmitError
from tests.engine.helpers import ask, run, tick

from .engines import scripted


@pytest.mark.parametrize("bound", [1, 2, 9])
def test_a_burst_is_served_up_to_the_bound_and_refused_beyond(bound: int) -> None:
    with scripted(
        capacity=2, config={"max_pending_requests": bound, "command_queue_capacity": 64}
    ) as (engine, runtime):
        for _ in range(bound):
            engine.submit(ask())
        for _ in range(9 * bound):
            with pytest.raises(SubmitError) as refusal:
                engine.submit(ask())
            assert refusal.value.reason == "backlog_full"
        assert runtime.steps == 0, "a refusal costs no step"
        assert len(engine._shared.live()) == bound, "and leaves no record"
        run(engine)
        metrics = engine.metrics()
        assert (metrics.completed, metrics.refused) == (bound, 9 * bound)


def test_n_counts_n_and_a_place_is_free_when_the_request_is_over() -> None:
    with scripted(capacity=4, config={"max_pending_requests": 4}) as (engine, _):
        first = engine.submit(ask(2, n=3))
        with pytest.raises(SubmitError):
            engine.submit(ask(n=2))
        engine.submit(ask(9))
        with pytest.raises(SubmitError):
            engine.submit(ask())
        while not first.ready:
            tick(engine)
        engine.submit(ask(n=3))
        run(engine)
