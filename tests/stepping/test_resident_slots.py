"""Seats and epochs: a name never means somebody else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.errors import ExecutionError
from steppe.stepping.resident_slots import ResidentSlots
from steppe.stepping.types import ResidentRef


def test_lowest_seat_first_and_epochs_start_at_one() -> None:
    slots = ResidentSlots(3)
    assert [slots.acquire() for _ in range(4)] == [
        ResidentRef(0, 1),
        ResidentRef(1, 1),
        ResidentRef(2, 1),
        None,
    ]


def test_a_retired_middle_seat_is_reused_with_another_epoch() -> None:
    slots = ResidentSlots(3)
    first, middle, _ = slots.acquire(), slots.acquire(), slots.acquire()
    assert middle is not None
    assert first is not None
    assert slots.release(middle)
    assert not slots.contains(middle)
    again = slots.acquire()
    assert again == ResidentRef(1, 2)
    assert not slots.release(middle), "the old name must not free the new occupant"
    assert slots.contains(ResidentRef(1, 2))


def test_the_seat_given_back_last_is_taken_first() -> None:
    slots = ResidentSlots(3)
    refs = [slots.acquire() for _ in range(3)]
    for ref in (refs[0], refs[2]):
        assert ref is not None
        slots.release(ref)
    assert [ref.slot for ref in (slots.acquire(), slots.acquire()) if ref] == [2, 0]


@pytest.mark.parametrize(
    "ref", [ResidentRef(), ResidentRef(-1, 1), ResidentRef(9, 1), ResidentRef(0, 1)]
)
def test_names_of_nobody(ref: ResidentRef) -> None:
    slots = ResidentSlots(2)
    assert not slots.contains(ref)
    assert not slots.release(ref)
    assert slots.free == 2


def test_reset_makes_every_old_name_stale() -> None:
    slots = ResidentSlots(2)
    old = [slots.acquire(), slots.acquire()]
    slots.reset(4)
    assert slots.capacity == slots.free == 4
    taken = [slots.acquire() for _ in range(4)]
    assert not set(old) & set(taken)
    with pytest.raises(ExecutionError, match="-1"):
        slots.reset(-1)


@given(st.integers(0, 5), st.lists(st.integers(0, 10)))
def test_no_name_is_ever_handed_out_twice(capacity: int, choices: list[int]) -> None:
    slots, live, seen = ResidentSlots(capacity), [], set()
    for choice in choices:
        if live and choice % 2:
            assert slots.release(live.pop(choice % len(live)))
        else:
            ref = slots.acquire()
            assert (ref is None) == (len(live) == capacity)
            if ref is not None:
                assert ref not in seen
                seen.add(ref)
                live.append(ref)
        assert all(map(slots.contains, live))
        assert slots.free == capacity - len(live)
