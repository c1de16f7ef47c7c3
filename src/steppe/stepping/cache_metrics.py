"""What a context cache has done so far, for whoever watches."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ContextCacheMetrics", "together"]

HELD = ("cached_pages", "leased_pages", "pinned_pages", "total_pages")
"""What a pool holds now. All else counts what has happened."""


@dataclass(frozen=True, slots=True)
class ContextCacheMetrics:
    """A copy of a context cache's counters, and of what its pool holds (seed 002).

    Sequences: ``admitted``, of which ``hit`` reused a page at admission and ``lookup_bypass`` did
    not ask. Tokens: ``queried`` of those that asked, ``reused`` instead of computed (``followed``
    of them after admission, while an earlier resident computed them). Pages, over all cache groups:
    ``published`` and ``evicted`` so far; ``cached`` can be found now, ``leased`` are held by
    sequences, ``pinned`` of those by system prompts, out of ``total``. ``spilled`` pages were
    copied out when they were evicted, ``restored`` copied back.
    """

    admitted_sequences: int = 0
    hit_sequences: int = 0
    lookup_bypass_sequences: int = 0
    queried_tokens: int = 0
    reused_tokens: int = 0
    followed_tokens: int = 0
    published_pages: int = 0
    evicted_pages: int = 0
    cached_pages: int = 0
    leased_pages: int = 0
    pinned_pages: int = 0
    total_pages: int = 0
    spilled_pages: int = 0
    restored_pages: int = 0

    @property
    def hit_rate(self) -> float:
        """Reused tokens of those that were asked for; 0 before anybody asked."""
        return self.reused_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def occupancy(self) -> float:
        """Leased pages of all there are, from 0 to 1."""
        return self.leased_pages / self.total_pages if self.total_pages else 0.0

    def after_the_end(self) -> ContextCacheMetrics:
        """What still counts when the cache is no more: what happened, and no pages."""
        return replace(self, **dict.fromkeys(HELD, 0))


def together(several: Iterable[ContextCacheMetrics | None]) -> ContextCacheMetrics | None:
    """Several caches as one; None if there is no cache among them."""
    known = [one for one in several if one is not None]
    if not known:
        return None
    names = [field.name for field in fields(ContextCacheMetrics)]
    return ContextCacheMetrics(**{name: sum(getattr(one, name) for one in known) for name in names})
