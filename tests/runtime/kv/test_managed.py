"""The leases of a generation: none outlives it."""

from __future__ import annotations

import pytest

from steppe.runtime.kv.context_cache import ContextCache, ContextCacheConfig
from steppe.runtime.kv.keys import PageKeys
from steppe.runtime.kv.managed import ManagedKVCacheRequest
from steppe.runtime.kv.pool import PagePool


def managed_over(pool: PagePool) -> ManagedKVCacheRequest:
    cache = ContextCache(pool, PageKeys(pool.page_size), [None], ContextCacheConfig())
    return ManagedKVCacheRequest(pool, cache)


def test_what_was_acquired_is_held_until_it_is_released() -> None:
    pool = PagePool([4], 4)
    managed = managed_over(pool)
    first, second = managed.acquire(8), managed.acquire(4)
    assert first is not None
    assert second is not None
    assert managed.pool is pool
    assert managed.leases == (first, second)
    managed.release(first)
    assert managed.leases == (second,)
    pool.verify()
    assert list(pool.leases) == [second]


def test_a_refused_acquisition_changes_nothing() -> None:
    pool = PagePool([4], 4)
    managed = managed_over(pool)
    first = managed.acquire(12)
    assert first is not None
    assert managed.acquire(8) is None
    assert managed.leases == (first,)
    pool.verify()
    assert list(pool.leases) == [first]


def test_leaving_returns_every_page_also_after_a_failure() -> None:
    pool = PagePool([4], 4)

    def fail() -> None:
        with managed_over(pool) as managed:
            managed.acquire(4)
            managed.acquire(8)
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail()
    pool.verify()
    assert not pool.leases


def test_closing_twice_is_closing_once() -> None:
    pool = PagePool([4], 4)
    managed = managed_over(pool)
    managed.acquire(8)
    managed.close()
    managed.close()
    assert managed.leases == ()
    pool.verify()
    assert not pool.leases
