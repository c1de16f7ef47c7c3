"""The circuit: when it opens, who may try, when it closes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.errors import CircuitOpenError
from steppe.replicas.remote.breaker import CircuitBreaker
from steppe.testing import FakeClock


def breaker(probes: int = 1) -> tuple[CircuitBreaker, FakeClock]:
    clock = FakeClock()
    made = CircuitBreaker(failures=3, seconds=5, most_seconds=15, probes=probes, clock=clock)
    return made, clock


def opened(probes: int = 1) -> tuple[CircuitBreaker, FakeClock]:
    made, clock = breaker(probes)
    for _ in range(3):
        made.permit().failed()
    return made, clock


def test_failures_in_a_row_open_it() -> None:
    one, _ = breaker()
    for _ in range(2):
        one.permit().failed()
    one.permit().succeeded()
    for _ in range(2):
        one.permit().failed()
    assert one.state == "closed"
    one.permit().dropped()
    one.permit().failed()
    assert one.state == "open"
    with pytest.raises(CircuitOpenError) as caught:
        one.permit()
    assert caught.value.retry_after == 5


@pytest.mark.parametrize("probes", [1, 3])
def test_half_open_admits_exactly_so_many_probes(probes: int) -> None:
    one, clock = opened(probes)
    clock.advance(4.9)
    with pytest.raises(CircuitOpenError):
        one.permit()
    clock.advance(0.1)
    assert one.state == "half_open"
    permits = [one.permit() for _ in range(probes)]
    with pytest.raises(CircuitOpenError):
        one.permit()
    permits[0].dropped()
    permits[0] = one.permit()
    for permit in permits:
        assert one.state == "half_open"
        permit.succeeded()
    assert one.state == "closed"
    for _ in range(10):
        one.permit()


def test_a_failed_probe_opens_it_again_for_longer_up_to_the_most() -> None:
    one, clock = opened()
    waits = []
    for _ in range(4):
        waits.append(one.retry_after)
        clock.advance(one.retry_after)
        one.permit().failed()
    assert waits == [5, 10, 15, 15]
    clock.advance(15)
    one.permit().succeeded()
    for _ in range(3):
        one.permit().failed()
    assert one.retry_after == 5


def test_what_was_sent_before_it_opened_decides_nothing_after() -> None:
    one, clock = breaker()
    old = [one.permit() for _ in range(6)]
    for permit in old[:3]:
        permit.failed()
    old[3].succeeded()
    assert one.state == "open"
    clock.advance(5)
    probe = one.permit()
    old[4].failed()
    old[5].succeeded()
    assert one.state == "half_open"
    probe.succeeded()
    assert one.state == "closed"


def test_a_permit_counts_once() -> None:
    one, _ = breaker()
    permit = one.permit()
    for _ in range(5):
        permit.failed()
    assert one.state == "closed"


def test_it_can_be_opened_and_closed_by_hand() -> None:
    one, clock = breaker()
    one.open(100)
    assert one.retry_after == 100
    clock.advance(99)
    assert one.state == "open"
    one.close()
    one.permit().succeeded()
    assert one.retry_after == 0


@given(st.lists(st.sampled_from(["permit", "ok", "bad", "drop", "wait"]), max_size=80))
def test_never_more_probes_than_allowed(moves: list[str]) -> None:
    one, clock = breaker(probes=2)
    held = []
    for move in moves:
        if move == "wait":
            clock.advance(3)
        elif move == "permit":
            state = one.state
            try:
                permit = one.permit()
            except CircuitOpenError:
                assert state != "closed"
                continue
            assert state != "open"
            held.append((permit, state == "half_open"))
            if state == "half_open":
                assert sum(probe for _, probe in held) <= 2
        elif held:
            permit, _ = held.pop(0)
            {"ok": permit.succeeded, "bad": permit.failed, "drop": permit.dropped}[move]()
            if one.state != "half_open":
                held = [(permit, False) for permit, _ in held]
    assert one.retry_after >= 0
