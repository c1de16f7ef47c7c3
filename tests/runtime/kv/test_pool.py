"""Pages: every one is free or held once, whatever the order of asking and giving back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from steppe.errors import ExecutionError
from steppe.runtime.kv.pool import GONE, PageLease, PagePool, pages_for


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert pages_for(tokens, 8) == pages


@pytest.mark.parametrize(("counts", "size"), [([], 8), ([0], 8), ([4, 0], 8), ([4], 0)])
def test_a_pool_without_pages_is_refused(counts: list[int], size: int) -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(counts, size)


def test_the_scarcest_group_decides() -> None:
    pool = PagePool([5, 3], 4)
    assert (pool.num_groups, pool.capacity, pool.free_pages, pool.used_pages) == (2, 3, 3, 0)
    assert pool.fits(12)
    assert not pool.fits(13)
    lease = pool.lease(12)
    assert lease is not None
    assert (pool.free_pages, pool.used_pages) == (0, 6)
    assert pool.lease(1) is None
    assert not lease.grow(13)
    assert [len(pages) for pages in lease.pages] == [3, 3]


def test_growing_keeps_the_pages_already_held() -> None:
    pool = PagePool([8], 4)
    lease = pool.lease(5)
    assert lease is not None
    before = list(lease.pages[0])
    assert (lease.num_pages, lease.room) == (2, 8)
    assert lease.grow(8)
    assert list(lease.pages[0]) == before
    assert lease.grow(9)
    assert lease.pages[0][:2] == before
    assert lease.room == 12


def test_a_lease_is_given_back_by_its_context_and_only_once() -> None:
    pool = PagePool([4], 4)
    lease = pool.lease(16)
    assert lease is not None
    with lease:
        assert pool.free_pages == 0
    assert pool.free_pages == 4
    lease.release()
    assert pool.free_pages == 4
    pool.verify()
    assert not pool.leases
    assert lease.num_pages == 0


def test_verify_sees_a_lost_page_and_a_page_held_twice() -> None:
    pool = PagePool([4, 4], 4)
    lease = pool.lease(4)
    assert lease is not None
    pool.verify()
    del pool.leases[lease]
    with pytest.raises(ExecutionError, match="cache group 0: pages are lost"):
        pool.verify()
    pool.leases[lease] = None
    twice = PageLease(pool)
    twice._pages = [list(pages) for pages in lease.pages]
    pool.leases[twice] = None
    with pytest.raises(ExecutionError, match="other holders than leases"):
        pool.verify()


def publish(lease: PageLease, pool: PagePool, name: bytes) -> None:
    """Publish every page of a lease, as if it were full."""
    for group, pages in zip(pool.groups, lease.pages, strict=True):
        for index, page in enumerate(pages):
            assert group.publish(page, name + bytes([index]))


def test_published_pages_stay_until_their_room_is_needed_and_the_oldest_go_first() -> None:
    pool = PagePool([4], 4)
    for name in (b"a", b"b"):
        with pool.lease(8) or pytest.fail("no room") as lease:
            publish(lease, pool, name)
    assert (pool.cached_pages, pool.free_pages, pool.used_pages) == (4, 4, 0)
    group = pool.groups[0]
    lease = pool.lease(4)
    assert lease is not None
    # Of the oldest, the page farthest from the root.
    assert (group.find(b"a\0"), group.find(b"a\1")) != (None, None)
    assert group.find(b"a\1") is None
    assert pool.evicted == 1
    pool.verify()


def test_a_lease_that_begins_with_found_pages_keeps_them_from_eviction() -> None:
    pool = PagePool([4], 4)
    with pool.lease(16) or pytest.fail("no room") as lease:
        publish(lease, pool, b"a")
        pages = list(lease.pages[0])
    again = pool.lease(16, [pages[:3]])
    assert again is not None
    assert again.pages[0][:3] == pages[:3]
    assert pool.evicted == 1
    pool.verify()
    before = (pool.cached_pages, pool.evicted, list(pool.groups[0].idle))
    assert pool.lease(8, [pages[:1]]) is None
    assert (pool.cached_pages, pool.evicted, list(pool.groups[0].idle)) == before
    again.release()
    pool.verify()


def test_two_leases_share_a_page_and_the_last_to_leave_frees_it() -> None:
    pool = PagePool([4], 4)
    first = pool.lease(8)
    assert first is not None
    publish(first, pool, b"a")
    second = pool.lease(12, [list(first.pages[0])])
    assert second is not None
    assert (first.unshared, second.unshared, pool.used_pages) == (0, 1, 3)
    first.release()
    assert (second.unshared, pool.free_pages) == (3, 1)
    pool.verify()
    second.release()
    assert (pool.free_pages, pool.cached_pages) == (4, 2)
    pool.verify()


def test_pages_behind_a_window_are_given_back_once() -> None:
    pool = PagePool([6, 6], 4)
    lease = pool.lease(20)
    assert lease is not None
    lease.leave_behind(1, 2)
    lease.leave_behind(1, 2)
    lease.leave_behind(1, 1)
    assert lease.pages[1][:2] == [GONE, GONE]
    assert GONE not in lease.pages[0]
    assert (pool.groups[0].available, pool.groups[1].available) == (1, 3)
    pool.verify()
    assert lease.grow(24)
    lease.release()
    assert pool.used_pages == 0
    pool.verify()


def test_who_is_told_of_an_eviction_is_told_before_the_page_is_used() -> None:
    told: list[tuple[int, bytes, int]] = []

    def on_evict(number: int, pages: list[tuple[int, bytes]]) -> None:
        told.extend((number, key, pool.groups[number].holders[page]) for page, key in pages)

    pool = PagePool([2, 3], 4, on_evict)
    with pool.lease(8) or pytest.fail("no room") as lease:
        publish(lease, pool, b"a")
    assert pool.lease(8) is not None
    assert sorted(told) == [(0, b"a\0", 0), (0, b"a\1", 0), (1, b"a\1", 0)]


def test_a_page_that_nobody_holds_or_that_has_a_key_is_not_published() -> None:
    pool = PagePool([3], 4)
    group = pool.groups[0]
    with pytest.raises(ExecutionError, match="cannot be published"):
        group.publish(0, b"a")
    lease = pool.lease(8)
    assert lease is not None
    first, second = lease.pages[0]
    assert group.publish(first, b"a")
    with pytest.raises(ExecutionError, match="cannot be published"):
        group.publish(first, b"b")
    # The first to publish a content owns its key; the other copy stays its holder's own.
    assert not group.publish(second, b"a")
    lease.release()
    assert group.find(b"a") == first
    assert (pool.cached_pages, len(group.free)) == (1, 2)
    pool.verify()


class PoolMachine(RuleBasedStateMachine):
    """Leases that come, grow, publish, share and go, beside a plain model of who holds what.

    The content of a page is what its key says: an odd name would be a page written by two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool([9, 7, 8], 4)
        self.held: list[PageLease] = []
        self.names = 0
        self.content: dict[tuple[int, int], bytes] = {}
        """What was written to (group, page) last."""

    def known(self) -> list[bytes]:
        """Keys that every group has."""
        common = set(self.pool.groups[0]._page)
        for group in self.pool.groups[1:]:
            common &= set(group._page)
        return sorted(common)

    @rule(tokens=st.integers(0, 40), data=st.data())
    def lease(self, tokens: int, data: st.DataObject) -> None:
        names = self.known()
        wanted = -(-tokens // 4)
        prefix = []
        if names and wanted:
            prefix = data.draw(st.lists(st.sampled_from(names), max_size=wanted, unique=True))
        pages = [[group.find(name) or 0 for name in prefix] for group in self.pool.groups]
        idle = [
            sum(page in group.idle for page in found)
            for group, found in zip(self.pool.groups, pages, strict=True)
        ]
        room = min(
            group.available - used for group, used in zip(self.pool.groups, idle, strict=True)
        )
        before = self.state()
        lease = self.pool.lease(tokens, pages if prefix else None)
        assert (lease is not None) == (wanted - len(prefix) <= room)
        if lease is None:
            assert self.state() == before
            return
        assert lease.num_pages == wanted
        for number, (found, held) in enumerate(zip(pages, lease.pages, strict=True)):
            assert held[: len(found)] == found
            for name, page in zip(prefix, found, strict=True):
                assert self.content[number, page] == name, "a cached page was written to"
        self.held.append(lease)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), tokens=st.integers(0, 40))
    def grow(self, which: int, tokens: int) -> None:
        lease = self.held[which % len(self.held)]
        before = [list(group) for group in lease.pages]
        missing = -(-tokens // 4) - lease.num_pages
        room = self.pool.free_pages
        assert lease.grow(tokens) == (missing <= room)
        assert [
            list(group[: len(old)]) for group, old in zip(lease.pages, before, strict=True)
        ] == (before)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), index=st.integers(0, 9), again=st.booleans())
    def publish(self, which: int, index: int, again: bool) -> None:
        lease = self.held[which % len(self.held)]
        if index >= lease.num_pages:
            return
        self.names += not again
        name = self.names.to_bytes(2)
        for number, (group, pages) in enumerate(zip(self.pool.groups, lease.pages, strict=True)):
            page = pages[index]
            if page == GONE or page in group._page.values():
                continue
            self.content[number, page] = name
            group.publish(page, name)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), index=st.integers(0, 9), data=st.data())
    def adopt(self, which: int, index: int, data: st.DataObject) -> None:
        lease, names = self.held[which % len(self.held)], self.known()
        if index >= lease.num_pages or not names:
            return
        name = data.draw(st.sampled_from(names))
        found = [group.find(name) for group in self.pool.groups]
        own = [pages[index] for pages in lease.pages]
        if GONE in own or any(a in pages for a, pages in zip(found, lease.pages, strict=True)):
            return
        lease.replace(index, [page for page in found if page is not None])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), group=st.integers(0, 2), index=st.integers(0, 9))
    def leave_behind(self, which: int, group: int, index: int) -> None:
        lease = self.held[which % len(self.held)]
        lease.leave_behind(group, min(index, lease.num_pages))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        lease = self.held.pop(which % len(self.held))
        lease.release()
        lease.release()

    @rule()
    def crash(self) -> None:
        """A step fails: everybody leaves."""
        while self.held:
            self.held.pop().release()

    def state(self) -> object:
        return [
            (list(g.free), list(g.idle), list(g.holders), dict(g._page)) for g in self.pool.groups
        ]

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        self.pool.verify()
        assert set(self.pool.leases) == {lease for lease in self.held if lease.num_pages}
        for lease in self.held:
            others = [one for one in self.held if one is not lease]
            alone = [
                sum(
                    page != GONE and all(page not in one.pages[number] for one in others)
                    for page in pages
                )
                for number, pages in enumerate(lease.pages)
            ]
            assert lease.unshared == min(alone)

    def teardown(self) -> None:
        self.crash()
        self.pool.verify()
        assert self.pool.used_pages == 0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
