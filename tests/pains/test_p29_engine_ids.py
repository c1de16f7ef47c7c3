"""P29: ids chosen by clients collided. Ids are the engine's own, and a label is only a label."""

from __future__ import annotations

from tests.engine.helpers import ask, expected, run

from .engines import scripted


def test_a_hundred_requests_with_one_label_keep_apart() -> None:
    with scripted(capacity=16, config={"command_queue_capacity": 128}) as (engine, _):
        handles = [engine.submit(ask(1 + number % 7, caller="same")) for number in range(100)]
        run(engine)
        assert [handle.id for handle in handles] == list(range(1, 101))
        for number, handle in enumerate(handles):
            assert handle.get().token_ids == expected(handle.id, 1 + number % 7)
        assert engine.submit(ask()).id == 101
        run(engine)
