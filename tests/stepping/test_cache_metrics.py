"""Counters of several caches as one: what happened stays, what was held goes with its engine."""

from __future__ import annotations

from dataclasses import fields

from steppe.stepping.cache_metrics import ContextCacheMetrics, together

NAMES = [field.name for field in fields(ContextCacheMetrics)]


def numbered(first: int) -> ContextCacheMetrics:
    """Every field another number."""
    return ContextCacheMetrics(*range(first, first + len(NAMES)))


def test_several_are_added_field_by_field() -> None:
    both = together([numbered(1), None, numbered(100)])
    assert both == ContextCacheMetrics(*range(101, 101 + 2 * len(NAMES), 2))
    assert together([None]) is None
    assert together([]) is None


def test_rates_are_of_the_sums_and_of_nothing_they_are_none() -> None:
    one = ContextCacheMetrics(queried_tokens=100, reused_tokens=100, leased_pages=1, total_pages=2)
    other = ContextCacheMetrics(queried_tokens=300, leased_pages=5, total_pages=6)
    both = together([one, other])
    assert both is not None
    assert (both.hit_rate, both.occupancy) == (0.25, 0.75)
    assert (ContextCacheMetrics().hit_rate, ContextCacheMetrics().occupancy) == (0.0, 0.0)


def test_of_a_cache_that_is_gone_only_what_happened_counts() -> None:
    before = numbered(1)
    after = before.after_the_end()
    held = {"cached_pages", "leased_pages", "pinned_pages", "total_pages"}
    for name in NAMES:
        assert getattr(after, name) == (0 if name in held else getattr(before, name))
