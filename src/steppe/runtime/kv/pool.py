"""The page pool of a rank, and the leases through which sequences hold pages (DESIGN section 6)."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Self

from steppe.errors import ExecutionError
from steppe.runtime.kv.eviction import plan_eviction
from steppe.runtime.kv.group import GroupPages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import TracebackType

    EvictionHook = Callable[[int, list[tuple[int, bytes]]], None]

__all__ = ["GONE", "PageLease", "PagePool", "pages_for"]

GONE = -1
"""In a lease's list: the page lies behind the group's window and was given back."""


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold ``num_tokens`` tokens."""
    return -(-num_tokens // page_size)


class PagePool:
    """Fixed pages of ``page_size`` tokens, numbered from 0 in each cache group. Actor thread only.

    Every page is free, leased or cached. An allocation takes all it asks for, in every group, or
    nothing; it evicts cached pages that nobody leases, the least recently used first.
    ``on_evict(group, pages with their keys)`` is told before their memory is used again.
    """

    def __init__(
        self, num_pages: Sequence[int], page_size: int, on_evict: EvictionHook | None = None
    ) -> None:
        if page_size < 1 or not num_pages or min(num_pages) < 1:
            raise ValueError("a pool needs a page size and at least one page in each group")
        self._page_size = page_size
        self._capacity = tuple(num_pages)
        self._on_evict = on_evict
        self.groups = tuple(GroupPages(count) for count in num_pages)
        """The pages of each cache group."""
        self.leases: dict[PageLease, None] = {}
        """Every lease that holds pages."""
        self.evicted = 0
        """Pages evicted so far, over all groups."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def num_groups(self) -> int:
        """Cache groups, each with its own pages."""
        return len(self._capacity)

    @property
    def capacity(self) -> int:
        """Pages of the smallest group: what the longest possible sequence has to fit."""
        return min(self._capacity)

    @property
    def free_pages(self) -> int:
        """Pages that an allocation can have, in the scarcest group: free ones, and cached ones
        that nobody leases.
        """
        return min([group.available for group in self.groups])

    @property
    def used_pages(self) -> int:
        """Leased pages, over all groups."""
        return sum(self._capacity) - sum(group.available for group in self.groups)

    @property
    def cached_pages(self) -> int:
        """Pages that a lookup can find, leased or not, over all groups."""
        return sum(group.published for group in self.groups)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of that many tokens fits an empty pool."""
        return pages_for(num_tokens, self._page_size) <= self.capacity

    def lease(
        self, num_tokens: int, prefix: Sequence[Sequence[int]] | None = None
    ) -> PageLease | None:
        """Pages for ``num_tokens`` tokens in every group, or None, and then nothing changed.

        ``prefix`` are published pages to begin with, as many in every group, GONE where a group
        needs none.
        """
        lease = PageLease(self)
        return lease if lease.open(num_tokens, prefix) else None

    def take(self, count: int, keep: Sequence[Collection[int]] = ()) -> list[list[int]] | None:
        """Lease ``count`` pages of each group, or nothing. Pages in ``keep`` are not evicted for
        it. For leases.
        """
        groups = self.groups
        if min([len(group.free) for group in groups]) < count:
            victims = plan_eviction(
                [count] * len(groups),
                [len(group.free) for group in groups],
                [group.idle for group in groups],
                keep,
            )
            if victims is None:
                return None
            for number, (group, pages) in enumerate(zip(groups, victims, strict=True)):
                if pages:
                    self.evicted += len(pages)
                    gone = [(page, group.evict(page)) for page in pages]
                    if self._on_evict is not None:
                        self._on_evict(number, gone)
        return [group.take(count) for group in groups]

    def verify(self) -> None:
        """Raise ExecutionError unless every page is free, leased or cached, exactly once."""
        for number, group in enumerate(self.groups):
            held = chain.from_iterable(lease.pages[number] for lease in self.leases)
            try:
                group.verify(page for page in held if page != GONE)
            except ExecutionError as error:
                raise ExecutionError(f"cache group {number}: {error}") from error


class PageLease:
    """The pages one sequence holds, in token order, one list per cache group. Actor thread only.

    Some may be shared with other leases: published pages, which nobody writes any more. GONE stands
    for a page that the group has no more use for. A context manager; ``release`` is idempotent and
    a released lease holds nothing.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: list[list[int]] = [[] for _ in range(pool.num_groups)]
        self._behind = [0] * pool.num_groups
        self.version = 0
        """Rises with every change of ``pages``."""
        self.room = 0
        """Tokens the pages have room for, in all."""

    @property
    def pages(self) -> Sequence[Sequence[int]]:
        """Page numbers per cache group."""
        return self._pages

    @property
    def num_pages(self) -> int:
        """Pages of the sequence so far, in each group, given back or not."""
        return len(self._pages[0])

    @property
    def unshared(self) -> int:
        """Pages that would become available with this lease's end, in the group with the fewest."""
        return min(
            [
                sum([page != GONE and group.holders[page] == 1 for page in pages])
                for group, pages in zip(self._pool.groups, self._pages, strict=True)
            ]
        )

    def open(self, num_tokens: int, prefix: Sequence[Sequence[int]] | None) -> bool:
        """Begin an empty lease with published pages, and grow it. False: nothing changed."""
        if prefix is None:
            return self.grow(num_tokens)
        missing = pages_for(num_tokens, self._pool.page_size) - len(prefix[0])
        taken = self._pool.take(max(0, missing), prefix)
        if taken is None:
            return False
        for number, (pages, new) in enumerate(zip(prefix, taken, strict=True)):
            group = self._pool.groups[number]
            for page in pages:
                if page != GONE:
                    group.hold(page)
            self._pages[number] = [*pages, *new]
            # Pages behind a window are the first ones.
            self._behind[number] = sum(page == GONE for page in pages)
        self._changed()
        self._pool.leases[self] = None
        return True

    def grow(self, num_tokens: int) -> bool:
        """Hold room for ``num_tokens`` tokens in all. False, and nothing changed, if pages lack."""
        if num_tokens <= self.room:
            return True
        missing = pages_for(num_tokens, self._pool.page_size) - len(self._pages[0])
        taken = self._pool.take(missing)
        if taken is None:
            return False
        for pages, new in zip(self._pages, taken, strict=True):
            pages.extend(new)
        self._changed()
        self._pool.leases[self] = None
        return True

    def replace(self, index: int, pages: Sequence[int]) -> None:
        """Hold published pages, one for each group, where unwritten ones of this lease were."""
        for number, page in enumerate(pages):
            self.replace_one(number, index, page)

    def replace_one(self, group: int, index: int, page: int) -> None:
        """``replace``, in one group."""
        pages = self._pool.groups[group]
        pages.hold(page)
        pages.drop(self._pages[group][index])
        self._pages[group][index] = page
        self.version += 1

    def leave_behind(self, group: int, index: int) -> None:
        """Give back a group's pages before ``index``: its window has passed them."""
        pages = self._pages[group]
        if index <= self._behind[group]:
            return
        # The last is dropped first: of pages cached together, those nearer the root stay longer.
        for number in range(index - 1, self._behind[group] - 1, -1):
            self._pool.groups[group].drop(pages[number])
            pages[number] = GONE
        self._behind[group] = index
        self.version += 1

    def release(self) -> None:
        """Give every page back."""
        self._pool.leases.pop(self, None)
        for group, pages in zip(self._pool.groups, self._pages, strict=True):
            # From the end, so that of a cached prefix its root is the last to be evicted.
            for page in reversed(pages):
                if page != GONE:
                    group.drop(page)
            pages.clear()
        self._changed()
        self._behind = [0] * len(self._behind)

    def _changed(self) -> None:
        self.version += 1
        self.room = len(self._pages[0]) * self._pool.page_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
