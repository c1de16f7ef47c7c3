"""The planner is a pure function; its laws are stated here as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.engine.planner import (
    LEAST_BUDGET,
    MOST_BUDGET,
    TARGET_SECONDS,
    Plan,
    PlannerSnapshot,
    StepBudget,
    plan,
)
from steppe.request import FinishReason
from steppe.stepping.types import DecodeEntry, PrefillEntry, ResidentNeed, ResidentRef


def need(
    slot: int, prefill: int = 0, decode: int = 1, room: int = 100, pages: int = 1
) -> ResidentNeed:
    return ResidentNeed(ResidentRef(slot, 1), prefill, decode, room, pages)


def planned(*needs: ResidentNeed, budget: int = 64, free: int = 0, size: int = 16) -> Plan:
    return plan(PlannerSnapshot(budget, size, free, needs))


def test_decodes_come_first_and_prompts_share_what_is_left_oldest_first() -> None:
    got = planned(need(0, prefill=50), need(1), need(2, prefill=50), need(3, decode=3)).batch
    assert got.decodes == (DecodeEntry(ResidentRef(1, 1)), DecodeEntry(ResidentRef(3, 1), 3))
    assert got.prefills == (
        PrefillEntry(ResidentRef(0, 1), 50),
        PrefillEntry(ResidentRef(2, 1), 10),
    )


def test_decodes_beyond_the_budget_leave_prompts_one_token() -> None:
    got = planned(need(0), need(1), need(2), need(3, prefill=9), budget=2).batch
    assert len(got.decodes) == 3
    assert got.prefills == (PrefillEntry(ResidentRef(3, 1), 1),)


def test_a_prompt_is_not_fed_token_by_token_where_decodes_alone_are_slow() -> None:
    """The answers of 31 others took longer than a step should, and a prompt of 256 tokens got one
    token in each.
    """
    needs = [*(need(slot) for slot in range(31)), need(31, prefill=256)]
    got = plan(PlannerSnapshot(16, 16, 0, tuple(needs), measured=True)).batch
    assert len(got.decodes) == 31
    assert got.prefills == (PrefillEntry(ResidentRef(31, 1), 31),)


def test_who_follows_another_prompt_leaves_the_budget_to_others() -> None:
    follower = need(1, prefill=50)._replace(follows=True)
    got = planned(need(0, prefill=30), follower, need(2, prefill=50)).batch
    assert got.prefills == (
        PrefillEntry(ResidentRef(0, 1), 30),
        PrefillEntry(ResidentRef(2, 1), 34),
    )
    assert not planned(need(0), follower).batch.prefills
    assert planned(follower).batch.prefills == (PrefillEntry(ResidentRef(1, 1), 50),)


def test_whoever_retires_runs_no_more() -> None:
    retire = ((ResidentRef(1, 1), FinishReason.CANCELLED),)
    got = plan(PlannerSnapshot(64, 16, 0, (need(0), need(1), need(2, prefill=3)), retire)).batch
    assert got.retire == retire
    assert [entry.ref.slot for entry in (*got.decodes, *got.prefills)] == [0, 2]


def test_the_newest_give_way_as_many_as_it_takes() -> None:
    needs = [need(0, room=0), need(1), need(2, pages=0), need(3, pages=2)]
    got = planned(*needs)
    assert got.batch.preempt == (ResidentRef(3, 1),)
    assert [entry.ref.slot for entry in got.batch.decodes] == [0, 1, 2]
    needs[0] = need(0, room=0, decode=40)  # three pages
    got = planned(*needs)
    assert [ref.slot for ref in got.batch.preempt] == [3, 2]
    assert got.waiting == (ResidentRef(0, 1),), "what the second gives back is not known yet"


def test_the_newest_itself_just_waits() -> None:
    got = planned(need(0), need(1), need(2, room=0))
    assert got.batch.preempt == ()
    assert got.waiting == (ResidentRef(2, 1),)
    assert len(got.batch.decodes) == 2


def test_nobody_takes_a_page_ahead_of_an_older_one_that_lacks_one() -> None:
    retire = ((ResidentRef(9, 1), FinishReason.CANCELLED),)
    needs = (need(0, room=0, decode=20), need(1, room=0), need(2), need(9))
    got = plan(PlannerSnapshot(64, 16, 1, needs, retire))
    assert got.batch.preempt == (), "whoever retires gives pages back first"
    assert [ref.slot for ref in got.waiting] == [0, 1]
    assert [entry.ref.slot for entry in got.batch.decodes] == [2]


def test_alone_at_the_wall_is_the_end_not_a_preemption() -> None:
    got = planned(need(0, room=0))
    assert got.batch.retire == ((ResidentRef(0, 1), FinishReason.LENGTH),)
    assert got.batch.preempt == ()


NEEDS = st.builds(
    ResidentNeed,
    ref=st.just(ResidentRef(0, 1)),
    prefill_remaining=st.one_of(st.just(0), st.integers(1, 200)),
    decode_tokens=st.integers(1, 6),
    room=st.integers(0, 40),
    pages=st.integers(0, 5),
    follows=st.booleans(),
)


@st.composite
def snapshots(draw: st.DrawFn) -> PlannerSnapshot:
    drawn = draw(st.lists(NEEDS, min_size=1, max_size=12))
    needs = tuple(
        ResidentNeed(
            ResidentRef(slot, 1),
            one.prefill_remaining,
            one.decode_tokens,
            # A prompt has its pages from admission on.
            max(one.room, one.prefill_remaining),
            one.pages,
            bool(slot and one.prefill_remaining and one.follows),
        )
        for slot, one in enumerate(drawn)
    )
    leaving = draw(st.sets(st.sampled_from(needs), max_size=len(needs) - 1)) if needs[1:] else ()
    return PlannerSnapshot(
        draw(st.integers(1, 300)),
        draw(st.integers(1, 16)),
        draw(st.integers(0, 8)),
        needs,
        tuple((one.ref, FinishReason.CANCELLED) for one in needs if one in leaving),
        draw(st.booleans()),
    )


@given(snapshots())
def test_laws_of_every_plan(snapshot: PlannerSnapshot) -> None:
    got = plan(snapshot)
    batch = got.batch
    assert got == plan(snapshot), "a pure function"
    needs = {one.ref: one for one in snapshot.residents}
    leaving = {ref for ref, _ in snapshot.retire}
    run = [entry.ref for entry in (*batch.decodes, *batch.prefills)]
    everyone = [*run, *batch.preempt, *(ref for ref, _ in batch.retire)]
    assert len(everyone) == len(set(everyone)), "nobody has two parts in a step"

    # Never beyond the budget, except for the decodes and one prompt token, or of a measured one as
    # many as the decodes.
    decoding = sum(entry.query_length for entry in batch.decodes)
    prompts = sum(entry.num_tokens for entry in batch.prefills)
    assert prompts <= max(decoding if snapshot.measured else 1, 1, snapshot.budget - decoding)
    assert got.tokens == decoding + prompts

    # Never more pages than are free or given back.
    size = snapshot.page_size
    taken = sum(
        max(0, -((needs[entry.ref].room - entry.query_length) // size)) for entry in batch.decodes
    )
    assert taken <= snapshot.free_pages + sum(needs[ref].pages for ref in batch.preempt)

    # The newest give way, for somebody older, and never while pages are about to come back.
    staying = [one.ref for one in snapshot.residents if one.ref not in leaving]
    preempted = len(batch.preempt)
    assert list(batch.preempt) == staying[::-1][:preempted]
    assert preempted < len(staying)
    assert not (preempted and leaving)

    # Something always comes of it, and the oldest comes first.
    assert everyone
    oldest = needs[staying[0]]
    if oldest.ref not in run:
        assert preempted or leaving or batch.retire or oldest.prefill_remaining, (
            "the oldest was held up for no reason"
        )
    # Who follows runs only where nothing else could.
    if any(needs[ref].follows for ref in run):
        assert all(needs[ref].follows for ref in run)
    waits = set(got.waiting)
    assert not waits & set(everyone)
    assert waits | set(everyone) | {
        one.ref for one in snapshot.residents if one.prefill_remaining
    } == set(needs)


def test_the_budget_is_fixed_or_finds_fifty_milliseconds() -> None:
    fixed = StepBudget(7)
    fixed.observe(1000, 3.0)
    assert fixed.tokens == 7

    for per_token in (1e-6, 1e-4, 1e-3, 1.0):
        budget = StepBudget(None)
        for _ in range(40):
            budget.observe(budget.tokens, budget.tokens * per_token)
        wanted = min(MOST_BUDGET, max(LEAST_BUDGET, TARGET_SECONDS / per_token))
        assert abs(budget.tokens - wanted) <= max(1, 0.1 * wanted)


@pytest.mark.parametrize("seconds", [1e-6, 0.01, 3.0])
def test_small_steps_say_nothing_about_large_ones(seconds: float) -> None:
    budget = StepBudget(None)
    before = budget.tokens
    for _ in range(50):
        budget.observe(1, seconds)
    assert budget.tokens == before


@pytest.mark.parametrize("fixed", [0.0, 0.01, 0.1, 0.4])
def test_a_chunk_may_double_a_step_that_is_slow_without_it(fixed: float) -> None:
    """Else a prompt on a slow backend costs many steps that are nearly all fixed cost."""
    per_token = 2e-4
    budget = StepBudget(None)
    for _ in range(30):
        for tokens in (1, 1, budget.tokens):
            budget.observe(tokens, fixed + per_token * tokens)
    wanted = (max(TARGET_SECONDS, 2 * fixed) - fixed) / per_token
    assert abs(budget.tokens - wanted) <= 0.1 * wanted
