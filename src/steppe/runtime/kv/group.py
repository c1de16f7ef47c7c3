"""The pages of one cache group: who is free, leased or cached, and what each one is known by."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from steppe.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["GroupPages"]


class GroupPages:
    """Pages 0 to ``count`` - 1 of one group. Actor thread only.

    A page is *free*, or *leased* (somebody holds it), or *idle*: published and held by nobody, kept
    until its room is needed. A published page has one key, a key one page; a leased page may be
    published as well. ``idle`` is in the order of last use, the oldest first.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = list(range(count - 1, -1, -1))
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.holders = [0] * count
        """How many leases hold each page."""
        self._key: list[bytes | None] = [None] * count
        self._page: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Pages that an allocation could have: free, or cached and held by nobody."""
        return len(self.free) + len(self.idle)

    @property
    def published(self) -> int:
        """Pages that a lookup can find."""
        return len(self._page)

    def find(self, key: bytes) -> int | None:
        """The page published under ``key``. Does not count as a use."""
        return self._page.get(key)

    def take(self, count: int) -> list[int]:
        """Lease that many free pages. The caller has made sure that there are as many."""
        if not count:
            return []
        taken = self.free[-count:][::-1]
        del self.free[-count:]
        for page in taken:
            self.holders[page] = 1
        return taken

    def hold(self, page: int) -> None:
        """Lease a published page, alone or beside others."""
        self.holders[page] += 1
        if self.holders[page] == 1:
            del self.idle[page]

    def drop(self, page: int) -> None:
        """Give one lease of a page back. Of a page nobody else holds, that is its last use."""
        self.holders[page] -= 1
        if self.holders[page]:
            return
        if self._key[page] is None:
            self.free.append(page)
        else:
            self.idle[page] = None

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count this moment as the last use of the idle pages among those with these keys."""
        for key in keys:
            page = self._page.get(key)
            if page is not None and page in self.idle:
                self.idle.move_to_end(page)

    def publish(self, page: int, key: bytes) -> bool:
        """Let lookups find a leased page. False, and nothing changed, for a key that has a page.

        Raises ExecutionError for a page that nobody holds, or that has a key.
        """
        if not self.holders[page] or self._key[page] is not None:
            raise ExecutionError(f"page {page} cannot be published")
        if key in self._page:
            return False
        self._page[key] = page
        self._key[page] = key
        return True

    def evict(self, page: int) -> bytes:
        """Forget an idle page; it is free now. Its key."""
        del self.idle[page]
        key = self._key[page]
        assert key is not None, "an idle page is published"
        del self._page[key]
        self._key[page] = None
        self.free.append(page)
        return key

    def verify(self, held: Iterable[int]) -> None:
        """Raise ExecutionError unless every page is free, leased or idle, exactly once, and as many
        of ``held`` (one entry per lease and page) name it as it has holders.
        """
        leased = Counter(held)
        seen = sorted([*self.free, *self.idle, *leased])
        if seen != list(range(self.count)):
            raise ExecutionError("pages are lost, or free, leased or cached twice")
        if any(leased[page] != holders for page, holders in enumerate(self.holders)):
            raise ExecutionError("pages have other holders than leases")
        named = {page: key for page, key in enumerate(self._key) if key is not None}
        if named != {page: key for key, page in self._page.items()}:
            raise ExecutionError("the index and the pages' keys differ")
        if any(page not in named for page in self.idle) or any(page in named for page in self.free):
            raise ExecutionError("a cached page has no key, or a free one has")
