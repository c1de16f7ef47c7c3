"""P13: a client that neither reads nor closes kept its lane forever. A total limit ends it."""

from __future__ import annotations

import pytest

from steppe.errors import DeadlineExceededError
from steppe.testing import FakeClock, LinearCost
from tests.engine.helpers import ask, run

from .engines import scripted


def test_an_unread_stream_ends_at_its_limit_and_frees_its_seat() -> None:
    clock = FakeClock()
    with scripted(
        capacity=1,
        context=1 << 30,
        cost=LinearCost(clock, per_step=0.5),
        config={"clock": clock},
    ) as (engine, _):
        stuck = engine.submit(ask(1 << 20, timeout=60.0))
        following = engine.submit(ask(3))
        run(engine)
        with pytest.raises(DeadlineExceededError):
            stuck.get()
        assert following.get().token_ids
        assert 60.0 <= clock() <= 65.0
