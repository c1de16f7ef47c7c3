"""The eviction planner against its definition: the oldest, as few as it takes, or none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from steppe.runtime.kv.eviction import plan_eviction


@given(st.data())
def test_a_plan_is_the_shortest_run_from_the_oldest_in_every_group_or_nothing(
    data: st.DataObject,
) -> None:
    groups = data.draw(st.integers(1, 3))
    counts = st.integers(0, 6)
    needs = data.draw(st.lists(counts, min_size=groups, max_size=groups))
    free = data.draw(st.lists(counts, min_size=groups, max_size=groups))
    pages = st.lists(st.integers(0, 9), unique=True, max_size=8)
    idle = data.draw(st.lists(pages, min_size=groups, max_size=groups))
    keep = data.draw(st.lists(pages, min_size=groups, max_size=groups))
    plan = plan_eviction(needs, free, idle, keep)
    allowed = [
        [page for page in old if page not in kept] for old, kept in zip(idle, keep, strict=True)
    ]
    missing = [max(0, need - have) for need, have in zip(needs, free, strict=True)]
    if any(len(old) < count for old, count in zip(allowed, missing, strict=True)):
        assert plan is None
    else:
        assert plan == [old[:count] for old, count in zip(allowed, missing, strict=True)]
