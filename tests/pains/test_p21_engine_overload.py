"""P21: overload became waiting without end. Full is an answer, at once, and costs nothing."""

from __future__ import annotations

import pytest

from steppe.errors import SubmitError
from tests.engine.helpers import ask, chunks, run, tick

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


def test_prompts_that_wait_are_bounded_by_their_tokens_too() -> None:
    with scripted(capacity=2, config={"max_pending_tokens": 100, "max_step_tokens": 50}) as (
        engine,
        runtime,
    ):
        engine.submit(ask(prompt=60))
        with pytest.raises(SubmitError) as refusal:
            engine.submit(ask(prompt=41))
        assert refusal.value.reason == "backlog_full"
        assert "60 prompt tokens are pending already, of at most 100" in str(refusal.value)
        with pytest.raises(SubmitError):
            engine.submit(ask(prompt=21, n=2))
        second = engine.submit(ask(prompt=20, n=2))
        assert runtime.steps == 0
        second.cancel()
        tick(engine)
        assert engine._shared.pending_tokens == 60, "who has left waits no more"
        run(engine)
        metrics = engine.metrics()
        assert (metrics.completed, metrics.cancelled, metrics.refused) == (1, 1, 2)


def test_a_prompt_that_has_been_read_is_out_of_the_way() -> None:
    with scripted(capacity=2, config={"max_pending_tokens": 100}) as (engine, _):
        first = engine.submit(ask(50, prompt=100))
        while not chunks(first):
            with pytest.raises(SubmitError):
                engine.submit(ask(prompt=1))
            tick(engine)
        assert not first.ready
        second = engine.submit(ask(prompt=100))
        run(engine)
        assert second.get().outputs[0].token_ids


def test_a_prompt_that_nobody_waits_beside_may_have_any_length() -> None:
    with scripted(capacity=2, config={"max_pending_tokens": 10}) as (engine, _):
        longest = engine.submit(ask(prompt=70))
        with pytest.raises(SubmitError):
            engine.submit(ask(prompt=1))
        run(engine)
        assert longest.ready
        engine.submit(ask(prompt=10))
        run(engine)
