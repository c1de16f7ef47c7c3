"""Overcommit, preemption and resumption, over a pool that is too small (DESIGN section 4)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from steppe.errors import RequestCancelledError, RequestFailedError
from steppe.request import FinishReason

from .helpers import ask, chunks, expected, run, tick

if TYPE_CHECKING:
    from .conftest import MakeEngine


def test_reservations_let_a_seated_request_always_finish(make_engine: MakeEngine) -> None:
    engine, runtime = make_engine(capacity=8, pages=8, page_size=4)
    handles = [engine.submit(ask(9, prompt=3)) for _ in range(6)]
    run(engine)
    for handle in handles:
        assert handle.get().token_ids == expected(handle.id, 9)
    metrics = engine.metrics()
    assert metrics.preemptions == metrics.stalls_pages == 0
    assert metrics.stalls_no_capacity > 0
    assert runtime.free_pages == 8


@pytest.mark.parametrize("scheduling", ["fcfs", "fair"])
@pytest.mark.parametrize("step_tokens", [7, 64, None])
def test_a_pool_too_small_changes_nobodys_tokens(
    make_engine: MakeEngine, seed: int, scheduling: str, step_tokens: int | None
) -> None:
    rng = random.Random(seed)
    engine, runtime = make_engine(
        capacity=8,
        pages=12,
        page_size=4,
        overcommit=True,
        config={"scheduling": scheduling, "max_step_tokens": step_tokens},
    )
    wanted = [(rng.randint(1, 9), rng.randint(1, 30)) for _ in range(40)]
    handles = [engine.submit(ask(count, prompt=prompt)) for prompt, count in wanted]
    seen: dict[int, tuple[int, ...]] = {handle.id: () for handle in handles}
    quiet = 0
    while True:
        before = engine.metrics().tokens
        if not engine.tick():
            break
        for handle in handles:
            for chunk in chunks(handle):
                seen[handle.id] += chunk.token_ids
        quiet = 0 if engine.metrics().tokens > before else quiet + 1
        assert quiet < 100, "no token for a hundred steps"
    for handle, (_, count) in zip(handles, wanted, strict=True):
        assert handle.get().token_ids == expected(handle.id, count) == seen[handle.id]
    metrics = engine.metrics()
    assert metrics.preemptions > 0
    assert runtime.leaks() == []


def test_the_newest_gives_way_and_comes_back_first(make_engine: MakeEngine) -> None:
    engine, runtime = make_engine(capacity=3, pages=5, page_size=4, overcommit=True)
    handles = [engine.submit(ask(12, prompt=4)) for _ in range(3)]
    last = engine.submit(ask(2, prompt=4))
    run(engine)
    events = [line for line in runtime.log if line[0] in ("preempt", "resume", "admit", "found")]
    first = events.index(("preempt", 3))
    assert ("preempt", 1) not in events, "the oldest always advances"
    assert events.index(("resume", 3)) > first
    assert events.index(("admit", 4)) > events.index(("resume", 3)), "nobody overtakes it"
    for handle in [*handles, last]:
        assert handle.get().token_ids
    assert engine.metrics().admitted_mid_flight == 3, "coming back is not joining"
    assert engine.metrics().queue_latency_count == 4


def test_a_preempted_request_can_be_cancelled(make_engine: MakeEngine) -> None:
    engine, runtime = make_engine(capacity=2, pages=5, page_size=4, overcommit=True)
    old, new = engine.submit(ask(14, prompt=4)), engine.submit(ask(14, prompt=4))
    while not engine.metrics().preemptions:
        tick(engine)
    new.cancel()
    run(engine)
    with pytest.raises(RequestCancelledError):
        new.get()
    assert old.get().token_ids == expected(old.id, 14)
    assert ("resume", new.id) not in runtime.log


def test_a_preempted_request_dies_with_its_batch(make_engine: MakeEngine) -> None:
    engine, runtime = make_engine(
        capacity=2, pages=5, page_size=4, overcommit=True, fail_steps={11: RuntimeError("boom")}
    )
    old, new = engine.submit(ask(14, prompt=4)), engine.submit(ask(14, prompt=4))
    late = engine.submit(ask(3))
    while not engine.metrics().preemptions:
        tick(engine)
    assert runtime.steps < 11
    run(engine)
    for handle in (old, new):
        with pytest.raises(RequestFailedError, match="boom"):
            handle.get()
    assert late.get().token_ids == expected(late.id, 3)


def test_open_ended_requests_end_at_the_wall(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(capacity=4, pages=10, page_size=4, context=10_000)
    handles = [engine.submit(ask(None, prompt=3)) for _ in range(3)]
    run(engine)
    for handle in handles:
        response = handle.get()
        assert response.finish_reason is FinishReason.LENGTH
        assert response.token_ids == expected(handle.id, len(response.token_ids))
        assert len(response.token_ids) >= 10 * 4 - 3
    assert sum((chunk.token_ids for chunk in chunks(handles[0])), ()) == handles[0].get().token_ids


@pytest.mark.parametrize("burst", [2, 5])
def test_several_tokens_a_step_preempt_and_resume_alike(
    make_engine: MakeEngine, burst: int
) -> None:
    engine, _ = make_engine(
        capacity=4,
        pages=9,
        page_size=4,
        overcommit=True,
        burst=lambda one, turn: (one + turn) % (burst + 1),
    )
    handles = [engine.submit(ask(20, prompt=3, logprobs=0)) for _ in range(8)]
    run(engine)
    for handle in handles:
        response = handle.get()
        assert response.token_ids == expected(handle.id, 20)
        assert response.logprobs is not None
        assert [one.token_id for one in response.logprobs] == list(response.token_ids)


def test_preemptions_and_wasted_work_are_bounded(make_engine: MakeEngine) -> None:
    """P26: demand three times the supply."""
    engine, runtime = make_engine(capacity=16, pages=32, page_size=4, overcommit=True)
    count, prompt, length = 24, 4, 28
    handles = [engine.submit(ask(length, prompt=prompt)) for _ in range(count)]
    run(engine)
    assert all(len(handle.get().token_ids) == length for handle in handles)
    preempted = [line[1] for line in runtime.log if line[0] == "preempt"]
    assert preempted
    assert max(preempted.count(one) for one in set(preempted)) <= 4
    work = sum(runtime.prompt_tokens.values()) + sum(runtime.decodes.values())
    assert work <= 2 * count * (prompt + length)
