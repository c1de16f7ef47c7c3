"""A step that is carried over from the one before is the step that would have been built anew."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.request import SamplingParams
from steppe.runtime.batches import Batch, BatchBuilder
from steppe.runtime.decoding.vanilla import VanillaDecoding
from steppe.runtime.executor import SequenceRows
from steppe.runtime.kv.pool import GONE, PagePool
from steppe.runtime.sequence import SequenceState, TextState
from steppe.stepping.resident_slots import ResidentSlots
from steppe.stepping.types import SequenceIdentity, SlotSeed
from steppe.text.pipeline import TextPipeline
from tests.runtime.fakes import byte_tokenizer, no_prefix

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_SIZE = 4
EVENTS = ["step"] * 6 + ["admit"] * 2 + ["leave", "pass", "replace"]
GROUPS = 2
STRATEGY = VanillaDecoding()
TOKENIZER = byte_tokenizer()
SEATS = 5
PARAMS = (
    SamplingParams(max_tokens=99, temperature=0.5),
    SamplingParams(max_tokens=99, logprobs=2, seed=3),
    SamplingParams(max_tokens=99, presence_penalty=1.0),
    SamplingParams(max_tokens=99, min_tokens=4, logit_bias={65: 1.5}),
)


class Residents:
    """Sequences that come, go, grow and lose pages as a session's do, over a pool too small."""

    def __init__(self) -> None:
        self.pool = PagePool([14, 17], PAGE_SIZE)
        # Numbers that differ between the groups.
        self.pool.groups[1].free.reverse()
        self.slots = ResidentSlots(SEATS)
        self.seated: list[SequenceState] = []
        self.builder = BatchBuilder(PAGE_SIZE, GROUPS, 0)
        self.carried = 0

    def admit(self, prompt: list[int], params: SamplingParams, reserve: int) -> None:
        lease = self.pool.lease(len(prompt) + reserve)
        ref = self.slots.acquire() if lease is not None else None
        if lease is None or ref is None:
            if lease is not None:
                lease.release()
            return
        seed = SlotSeed(1 + ref.epoch, ref.slot, tuple(prompt), params, 5, 99, frozenset({250}))
        text = TextState(TextPipeline(TOKENIZER), [])
        identity = SequenceIdentity(seed.request_id, ref)
        self.seated.append(SequenceState(seed, identity, lease, text, no_prefix()))

    def leave(self, index: int) -> None:
        """Retire or preempt: both free the seat and the pages."""
        sequence = self.seated.pop(index)
        self.slots.release(sequence.ref)
        sequence.lease.release()

    def pass_window(self, index: int) -> None:
        """Give back the pages of the second group before the one that is written."""
        sequence = self.seated[index]
        sequence.lease.leave_behind(1, sequence.computed // PAGE_SIZE)

    def replace_page(self, index: int) -> None:
        """Hold a published page where an unwritten one was."""
        lease = self.seated[index].lease
        if self.seated[index].computed or GONE in (pages[0] for pages in lease.pages):
            return
        taken = self.pool.take(1)
        if taken is not None:
            fresh = [pages[0] for pages in taken]
            lease.replace(0, fresh)
            for group, page in zip(self.pool.groups, fresh, strict=True):
                group.drop(page)  # the hold of ``take``

    def step(self, *, chunk: int, only: set[int], sampled: int, fails: bool) -> None:
        """Run a step over some of the residents, if the backend lets it."""
        parts = []
        for index, sequence in enumerate(self.seated):
            if index in only:
                continue
            if sequence.prefilling:
                end = min(sequence.computed + chunk, sequence.prefill_end)
                tokens = tuple(sequence.tokens[sequence.computed : end])
                last = (len(tokens) - 1,) if end == sequence.prefill_end else ()
                parts.append(SequenceRows(sequence, tokens, (), last))
            elif sequence.lease.grow(sequence.computed + 1):
                rows = STRATEGY.rows(sequence, 1)
                parts.append(SequenceRows(sequence, rows.token_ids, (), rows.sampled, rows))
        if not parts:
            return
        before = self.builder._last
        built = self.builder.build(parts)
        self.carried += before is not None and self.builder._last is before
        assert_same(built, BatchBuilder(PAGE_SIZE, GROUPS, 0).build(parts))
        if fails:
            return
        for part in parts:
            part.sequence.computed += len(part.token_ids)
            if part.sampled:
                part.sequence.append(sampled, None)


def assert_same(built: Batch, expected: Batch) -> None:
    assert [one.row for one in built.asked] == [one.row for one in expected.asked]
    for ours, theirs in zip(built[:2], expected[:2], strict=True):
        for field in fields(ours):
            assert_equal(field.name, getattr(ours, field.name), getattr(theirs, field.name))


def assert_equal(name: str, ours: object, theirs: object) -> None:
    if isinstance(theirs, np.ndarray):
        assert isinstance(ours, np.ndarray), name
        assert (ours.dtype, ours.shape, ours.flags.c_contiguous) == (
            theirs.dtype,
            theirs.shape,
            True,
        ), name
        assert ours.tobytes() == theirs.tobytes(), name
    elif isinstance(theirs, list | tuple):
        assert isinstance(ours, list | tuple), name
        assert len(ours) == len(theirs), name
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(name, one, other)
    elif hasattr(theirs, "in_prompt"):
        for field in fields(theirs):
            assert_equal(name, getattr(ours, field.name), getattr(theirs, field.name))
    else:
        assert ours == theirs, name


def prompts() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 200), min_size=1, max_size=9)


@given(data=st.data())
def test_whatever_happens_between_steps_they_are_as_if_built_from_nothing(
    data: st.DataObject,
) -> None:
    residents = Residents()
    draw: Callable[..., int] = lambda *bounds: data.draw(st.integers(*bounds))  # noqa: E731
    for _ in range(draw(1, 40)):
        index = draw(0, len(residents.seated) - 1) if residents.seated else None
        match data.draw(st.sampled_from(EVENTS)):
            case "admit":
                params = data.draw(st.sampled_from(PARAMS))
                residents.admit(data.draw(prompts()), params, draw(0, 9))
            case "leave" if index is not None:
                residents.leave(index)
            case "pass" if index is not None:
                residents.pass_window(index)
            case "replace" if index is not None:
                residents.replace_page(index)
            case _:
                only = data.draw(st.sets(st.integers(0, SEATS - 1), max_size=1))
                residents.step(
                    chunk=draw(1, 9),
                    only=only if draw(0, 3) == 0 else set(),
                    sampled=draw(0, 200),
                    fails=draw(0, 9) == 0,
                )
    while residents.seated:
        residents.leave(0)
    residents.pool.verify()


@pytest.mark.parametrize("params", PARAMS)
def test_a_steady_batch_is_carried_over_and_survives_its_pages(params: SamplingParams) -> None:
    residents = Residents()
    for length in (3, 6):
        residents.admit(list(range(length)), params, 0)
    for _ in range(12):
        residents.step(chunk=9, only=set(), sampled=97, fails=False)
    # The first step is a prefill, the next is built; the longer one needs a wider table twice.
    assert residents.carried >= 7


def test_the_next_occupant_of_a_seat_is_not_its_last() -> None:
    residents = Residents()
    for _ in range(2):
        residents.admit([1, 2, 3], PARAMS[0], 4)
    for _ in range(3):
        residents.step(chunk=9, only=set(), sampled=97, fails=False)
    assert residents.carried == 1
    computed, ref = residents.seated[1].computed, residents.seated[1].ref
    residents.leave(1)
    residents.admit([7, 8, 9], PARAMS[0], 4)
    again = residents.seated[1]
    assert (again.ref.slot, again.ref.epoch) == (ref.slot, ref.epoch + 1)
    # Where the one before would stand now, with other tokens and maybe other pages.
    again.tokens += [50] * (computed + 1 - len(again.tokens))
    again.computed = computed
    residents.step(chunk=9, only=set(), sampled=97, fails=False)
    assert residents.carried == 1


def test_a_step_that_failed_is_built_anew_when_it_comes_again() -> None:
    residents = Residents()
    residents.admit([1, 2, 3], PARAMS[0], 9)
    for fails in (False, False, False, True, True, False):
        residents.step(chunk=9, only=set(), sampled=97, fails=fails)
    assert residents.carried >= 2
