"""P01: a stream whose reader left kept generating. Here it leaves at the next boundary."""

from __future__ import annotations

import pytest

from tests.engine.helpers import ask, chunks, expected, run, tick

from .engines import scripted


@pytest.mark.parametrize("mixed", [True, False])
def test_a_reader_who_leaves_frees_seat_and_pages_in_the_next_commit(mixed: bool) -> None:
    with scripted(mixed=mixed, capacity=4, pages=1000, context=8192) as (engine, runtime):
        others = [engine.submit(ask(40)) for _ in range(2)]
        ghost = engine.submit(ask(4096, ignore_eos=True))
        read = 0
        while read < 3:
            tick(engine)
            read += len(chunks(ghost))
        held = runtime.free_pages
        steps = runtime.decodes[ghost.id]
        ghost.stream.cancel()
        tick(engine)
        assert engine.resident == 2
        assert runtime.free_pages > held
        assert runtime.decodes[ghost.id] == steps
        run(engine)
        for handle in others:
            assert handle.get().token_ids == expected(handle.id, 40)
