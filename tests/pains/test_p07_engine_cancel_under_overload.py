"""P07: overload lost cancels, or cancelled ids piled up. A cancel needs no place in any queue."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from steppe.errors import SubmitError
from tests.engine.helpers import ask, run

from .engines import scripted


def test_ten_thousand_cancels_through_a_full_queue_leave_nothing() -> None:
    with scripted(capacity=1, config={"command_queue_capacity": 2}) as (engine, _):

        def cycle() -> None:
            handles = [engine.submit(ask()) for _ in range(2)]
            with pytest.raises(SubmitError):
                engine.submit(ask())
            for handle in handles:
                engine.cancel(handle.id)
            run(engine)
            assert all(handle.ready for handle in handles)

        for _ in range(4500):
            cycle()
        gc.collect()
        tracemalloc.start()
        for _ in range(500):
            cycle()
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert engine.metrics().cancelled == 10_000
        assert grown < 16 * 1024
