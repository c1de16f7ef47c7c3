"""One sequence's dealings with the context cache: what it may reuse, and what it may publish."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.runtime.kv.keys import PageChain

__all__ = ["PrefixUse"]


class PrefixUse:
    """Made by a lookup, and kept beside the lease. Actor thread only.

    Its first ``num_pages`` pages were found: ``pages`` per cache group. Up to ``reusable`` pages
    may come from the cache, up to ``publishable`` may go there; the first ``done`` are dealt with.
    """

    __slots__ = (
        "chain",
        "done",
        "num_pages",
        "pages",
        "publishable",
        "reusable",
        "seen",
    )

    def __init__(self, chain: PageChain, reusable: int, publishable: int) -> None:
        self.chain = chain
        self.reusable = reusable
        self.publishable = publishable
        self.pages: Sequence[Sequence[int]] | None = None
        self.num_pages = 0
        self.done = 0
        self.seen = 0
        """The cache's publications when this sequence last looked."""

    def begin(self, pages: Sequence[Sequence[int]], seen: int) -> None:
        """Take what a lookup found."""
        self.seen = seen
        self.num_pages = self.done = len(pages[0])
        self.pages = pages if self.num_pages else None
