"""Which cached pages make room for new ones: a pure function of what is known before."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["plan_eviction"]


def plan_eviction(
    needs: Sequence[int],
    free: Sequence[int],
    idle: Sequence[Iterable[int]],
    keep: Sequence[Iterable[int]] = (),
) -> list[list[int]] | None:
    """The pages to evict in each cache group so that ``needs`` pages are free there.

    ``free`` counts the free pages of each group; ``idle`` are its cached pages that nobody leases,
    least recently used first, which is the order they go in; ``keep`` are those among them that the
    same admission is about to lease. As few go as it takes. None, if all of them do not suffice in
    some group: then nobody's pages are to be touched.
    """
    victims: list[list[int]] = []
    for group, (need, have, pages) in enumerate(zip(needs, free, idle, strict=True)):
        missing = need - have
        if missing <= 0:
            victims.append([])
            continue
        kept = set(keep[group]) if keep else ()
        chosen = list(islice((page for page in pages if page not in kept), missing))
        if len(chosen) < missing:
            return None
        victims.append(chosen)
    return victims
