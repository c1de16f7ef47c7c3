"""P05: requests whose clients were gone still ran when they reached the head."""

from __future__ import annotations

from tests.engine.helpers import ask, run, tick

from .engines import scripted


def test_dead_entries_are_dropped_at_once_and_never_prefilled() -> None:
    with scripted(capacity=1) as (engine, runtime):
        engine.submit(ask(4))
        dead = [engine.submit(ask(50)) for _ in range(5)]
        live = engine.submit(ask(2))
        tick(engine)
        assert engine.queued == 6
        for handle in dead:
            handle.cancel()
        tick(engine)
        assert engine.queued == 1
        run(engine)
        assert live.get().token_ids
        founded = [line[1] for line in runtime.log if line[0] == "found"]
        assert founded == [1, live.id]
        assert not {handle.id for handle in dead} & runtime.prompt_tokens.keys()
