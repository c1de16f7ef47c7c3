"""P28: one caller's backlog was everybody's wait."""

from __future__ import annotations

from tests.engine.helpers import ask, run

from .engines import scripted


def test_ten_callers_get_equal_shares_whatever_they_ask_for() -> None:
    with scripted(
        capacity=4,
        config={
            "scheduling": "fair",
            "max_pending_requests": 1024,
            "command_queue_capacity": 1024,
        },
    ) as (engine, runtime):
        owner = {}
        for number in range(10):
            for _ in range(10 * (number + 1)):
                handle = engine.submit(ask(5 + 3 * number, caller=str(number), prompt=1))
                owner[handle.id] = number
        while runtime.steps < 300:
            engine.tick()
        shares = [0.0] * 10
        for request_id, count in runtime.decodes.items():
            shares[owner[request_id]] += count
        # Jain's index: 1 when all are equal, a tenth when one has it all.
        index = sum(shares) ** 2 / (10 * sum(share**2 for share in shares))
        assert index > 0.9
        run(engine)
