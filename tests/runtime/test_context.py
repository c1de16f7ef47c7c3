"""Who is seated: seats, names, leases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steppe.errors import ExecutionError
from steppe.runtime.context import DecodingInferenceContext
from steppe.runtime.kv.context_cache import ContextCache, ContextCacheConfig
from steppe.runtime.kv.keys import PageKeys
from steppe.runtime.kv.managed import ManagedKVCacheRequest
from steppe.runtime.kv.pool import PagePool
from steppe.stepping.resident_slots import ResidentSlots
from steppe.stepping.types import ResidentRef, SlotSeed
from steppe.text.pipeline import TextPipeline
from tests.runtime.fakes import byte_tokenizer
from tests.runtime.test_sequence import seed_of


def pipeline(seed: SlotSeed) -> TextPipeline:
    return TextPipeline(byte_tokenizer(), seed.params.stop)


class Room:
    """A context of three seats over ten pages of four tokens."""

    def __init__(self) -> None:
        self.pool = PagePool([10], 4)
        self.slots = ResidentSlots(3)
        cache = ContextCache(self.pool, PageKeys(4), [None], ContextCacheConfig())
        self.managed = ManagedKVCacheRequest(self.pool, cache)
        self.context = DecodingInferenceContext(self.slots, self.managed, pipeline)

    def state(self) -> tuple[object, ...]:
        return (
            self.pool.free_pages,
            self.slots.free,
            self.managed.leases,
            list(self.context.residents),
        )


def seed(index: int) -> SlotSeed:
    return replace(seed_of(), original_index=index)


def test_seats_are_taken_lowest_first_and_found_by_name() -> None:
    room = Room()
    seated = [room.context.seat(seed(index), 8) for index in range(3)]
    assert [one and one.ref for one in seated] == [ResidentRef(slot, 1) for slot in range(3)]
    assert room.context.residents == seated
    for one in seated:
        assert one is not None
        assert room.context.find(one.ref) is one
        assert one.lease.num_pages == 2


def test_a_seat_taken_again_has_another_epoch_and_comes_last() -> None:
    room = Room()
    first, second = (room.context.seat(seed(index), 4) for index in range(2))
    assert first is not None
    assert second is not None
    room.context.unseat(first)
    third = room.context.seat(seed(2), 4)
    assert third is not None
    assert third.ref == ResidentRef(0, 2)
    assert room.context.residents == [second, third]
    with pytest.raises(ExecutionError, match="no resident is"):
        room.context.find(first.ref)


@pytest.mark.parametrize("tokens", [41, 33])
def test_without_pages_nothing_changes(tokens: int) -> None:
    room = Room()
    room.context.seat(seed(0), 8)
    before = room.state()
    assert room.context.seat(seed(1), tokens) is None
    assert room.state() == before
    room.pool.verify()


def test_without_a_seat_nothing_changes() -> None:
    room = Room()
    for index in range(3):
        room.context.seat(seed(index), 4)
    before = room.state()
    assert room.context.seat(seed(3), 4) is None
    assert room.state() == before
    room.pool.verify()


def test_an_index_is_seated_once() -> None:
    room = Room()
    room.context.seat(seed(4), 4)
    before = room.state()
    with pytest.raises(ExecutionError, match="index 4 is seated already"):
        room.context.seat(seed(4), 4)
    assert room.state() == before


def test_clearing_unseats_everybody() -> None:
    room = Room()
    for index in range(3):
        room.context.seat(seed(index), 8)
    room.context.clear()
    assert room.context.residents == []
    assert room.slots.free == 3
    room.pool.verify()
    assert not room.pool.leases
