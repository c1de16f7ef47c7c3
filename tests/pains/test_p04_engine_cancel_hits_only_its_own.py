"""P04: a queued client's disconnect killed somebody else's decode. A cancel names one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.errors import RequestCancelledError
from tests.engine.helpers import ask, expected, run, tick

from .engines import scripted

if TYPE_CHECKING:
    import random


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=20),
    st.sets(st.integers(0, 19)),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_whoever_was_not_cancelled_gets_what_it_always_gets(
    lengths: list[int], cancelled: set[int], rng: random.Random, mixed: bool
) -> None:
    with scripted(mixed=mixed, capacity=3) as (engine, _):
        handles = [engine.submit(ask(length)) for length in lengths]
        victims = [index for index in cancelled if index < len(handles)]
        rng.shuffle(victims)
        gone = set()
        for index in victims:
            tick(engine, rng.randint(0, 3))
            if not handles[index].ready:
                gone.add(index)
            engine.cancel(handles[index].id)
        run(engine)
        for index, (handle, length) in enumerate(zip(handles, lengths, strict=True)):
            try:
                tokens = handle.get().token_ids
            except RequestCancelledError:
                assert index in gone
            else:
                assert index not in gone
                assert tokens == expected(handle.id, length)
