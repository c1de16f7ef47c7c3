"""The context cache: computed prefixes, found again by their content (DESIGN section 6).

A prefix of n pages can be reused if every cache group has what its layers will read of it: all n
pages, or in a group with a window those that the window at its end reaches into. Pages are
published when a step has filled them and the step is being committed; from then on nobody writes
them.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.errors import ConfigError
from steppe.request import FinishReason
from steppe.runtime.kv.keys import PageChain, PrefixIdentity
from steppe.runtime.kv.pool import GONE
from steppe.runtime.kv.prefix import PrefixUse
from steppe.runtime.kv.spill import RestoreCost
from steppe.stepping.cache_metrics import ContextCacheMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from steppe.runtime.kv.keys import PageKeys
    from steppe.runtime.kv.pool import PageLease, PagePool
    from steppe.runtime.kv.spill import SpillTier
    from steppe.runtime.sequence import SequenceState
    from steppe.stepping.types import SlotSeed

    PageWriter = Callable[[int, Sequence[int], npt.NDArray[np.uint8]], None]

__all__ = ["ContextCache", "ContextCacheConfig"]

NO_LIMIT = sys.maxsize


@dataclass(frozen=True, slots=True)
class ContextCacheConfig:
    """Whether computed prefixes are kept for later requests (seed 002).

    They are kept in pages that no sequence needs at the moment, so they take no memory from anyone.
    Pages that are evicted from there are copied into ``spill_memory`` more bytes, of host memory or
    of a file in ``spill_folder``, and copied back when that is faster than computing them.

    Raises ConfigError naming the field.
    """

    enabled: bool = True
    spill_memory: int = 0
    spill_folder: Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ConfigError("context_cache", f"must be true or false, not {self.enabled!r}")
        if isinstance(self.spill_memory, bool) or self.spill_memory < 0:
            raise ConfigError("spill_memory", f"must be 0 or more bytes, not {self.spill_memory!r}")
        if self.spill_folder is not None and not self.spill_memory:
            raise ConfigError("spill_folder", "says where, but spill_memory says no size")


class ContextCache:
    """Finds and publishes prefixes in a page pool. Actor thread only.

    ``windows`` are those of the pool's cache groups, None where layers see everything. With
    ``spill`` evicted pages are looked for there too, and ``pages`` writes them.
    """

    def __init__(
        self,
        pool: PagePool,
        keys: PageKeys,
        windows: Sequence[int | None],
        config: ContextCacheConfig,
        spill: SpillTier | None = None,
        pages: PageWriter | None = None,
    ) -> None:
        self._pool = pool
        self._keys = keys
        self._size = pool.page_size
        self._enabled = config.enabled
        self._full = [number for number, window in enumerate(windows) if window is None]
        self._windows = [(n, window) for n, window in enumerate(windows) if window is not None]
        self._spill = spill
        self._write = pages
        self.cost = RestoreCost(pool.page_size)
        """What restoring takes, and computing."""
        self._admitted = self._hits = self._bypassed = 0
        self._queried = self._reused = self._followed = 0
        self._published = 0

    # ---- admission ---------------------------------------------------------------------------

    def look_up(self, seed: SlotSeed, *, bypass: bool = False) -> PrefixUse:
        """What of ``seed``'s prefix can be reused now. Changes nothing, and is no use of a page.

        The last known token is always computed, since the next is sampled from it, and so is every
        prompt token that is still to be scored, and every token of an embedding.
        """
        chain = seed.page_chain
        if not isinstance(chain, PageChain):
            chain = self._keys.chain(PrefixIdentity(seed.cache_salt))
        known = len(seed.prompt_token_ids) + len(seed.generated)
        most = known - 1
        if seed.params.prompt_logprobs is not None:
            scored = len(seed.prompt_logprobs)
            if scored < len(seed.prompt_token_ids):
                most = max(0, scored - 1)
        if bypass or seed.embed or seed.cache_lookup == "bypass" or not self._enabled:
            most = 0
        publishable = {
            "all": NO_LIMIT,
            "prompt": len(seed.prompt_token_ids) // self._size,
            "none": 0,
        }[seed.cache_commit]
        use = PrefixUse(chain, most // self._size, publishable if self._enabled else 0)
        if use.reusable:
            tokens = seed.prompt_token_ids + seed.generated
            keys = chain.extend(tokens, use.reusable)[: use.reusable]
            use.begin(self._find(keys), self._published)
        return use

    def _find(self, keys: Sequence[bytes]) -> list[list[int]]:
        """Pages per group of the longest reusable prefix of those keys."""
        groups = self._pool.groups
        length = len(keys)
        found: list[list[int]] = [[] for _ in groups]
        for number in self._full:
            pages = found[number]
            for key in keys[:length]:
                page = groups[number].find(key)
                if page is None:
                    break
                pages.append(page)
            length = len(pages)
        if self._windows and length:
            length = self._find_windows(keys, length, found)
        for number in self._full:
            del found[number][length:]
        return found

    def _find_windows(self, keys: Sequence[bytes], length: int, found: list[list[int]]) -> int:
        """Shorten ``length`` until every windowed group has what its window needs at that end."""
        groups = self._pool.groups
        runs = []
        for number, _ in self._windows:
            pages = [groups[number].find(key) for key in keys[:length]]
            run, ends = 0, []
            for page in pages:
                run = 0 if page is None else run + 1
                ends.append(run)
            runs.append((pages, ends))
        while length and any(
            ends[length - 1] < length - self._first(window, length * self._size)
            for (_, window), (_, ends) in zip(self._windows, runs, strict=True)
        ):
            length -= 1
        for (number, window), (pages, _) in zip(self._windows, runs, strict=True):
            first = self._first(window, length * self._size)
            found[number] = [
                GONE if index < first or page is None else page
                for index, page in enumerate(pages[:length])
            ]
        return length

    def first_page(self, group: int, computed: int) -> int:
        """The first page that a group's queries after ``computed`` tokens still read."""
        window = dict(self._windows).get(group)
        return 0 if window is None else self._first(window, computed)

    def find_pages(
        self, identity: PrefixIdentity, tokens: Sequence[int], count: int
    ) -> list[list[int]]:
        """Pages per group of the longest reusable prefix among the first ``count`` pages."""
        return self._find(self._keys.chain(identity).extend(tokens, count)[:count])

    def publish_pages(
        self, identity: PrefixIdentity, tokens: Sequence[int], count: int, lease: PageLease
    ) -> None:
        """Publish the first ``count`` pages of a lease, which hold ``tokens``."""
        keys = self._keys.chain(identity).extend(tokens, count)
        for group, pages in zip(self._pool.groups, lease.pages, strict=True):
            for key, page in zip(keys, pages, strict=False):
                if page != GONE:
                    self._published += group.publish(page, key)

    def _first(self, window: int, computed: int) -> int:
        """The first page that a query after ``computed`` tokens still reads."""
        return max(0, computed - window + 1) // self._size

    def admitted(self, sequence: SequenceState) -> None:
        """A sequence was seated with what its lookup found."""
        use = sequence.prefix
        self._admitted += 1
        if not use.reusable and sequence.prefill_end > self._size:
            self._bypassed += 1
            return
        self._queried += sequence.prefill_end
        self._hits += use.num_pages > 0
        self._reused += use.num_pages * self._size

    # ---- the spill tier ----------------------------------------------------------------------

    @property
    def spills(self) -> bool:
        """Whether there is a spill tier."""
        return self._spill is not None

    def restore(self, sequence: SequenceState) -> None:
        """Copy back what the spill tier has of a prompt that was just seated, if that pays."""
        use, spill = sequence.prefix, self._spill
        if spill is None or self._write is None or not use.reusable or not self.cost.pays():
            return
        index = first = use.num_pages
        keys, began = use.chain.keys, time.perf_counter()
        while index < use.reusable and self._restore_page(sequence, index, keys[index], spill):
            index += 1
        if index == first:
            return
        self.cost.restored(index - first, time.perf_counter() - began)
        sequence.take_computed((index - first) * self._size)
        use.done = max(use.done, index)
        self._reused += (index - first) * self._size
        self.commit(sequence)

    def _restore_page(
        self, sequence: SequenceState, index: int, key: bytes, spill: SpillTier
    ) -> bool:
        """Make page ``index`` of a lease hold its content in every group, or touch none."""
        groups, lease = self._pool.groups, sequence.lease
        found = [group.find(key) for group in groups]
        copies = [
            None if page is not None else spill.get(number, key)
            for number, page in enumerate(found)
        ]
        for page, copy in zip(found, copies, strict=True):
            if page is None and copy is None:
                return False
        assert self._write is not None
        for number, (page, copy) in enumerate(zip(found, copies, strict=True)):
            if page is not None:
                lease.replace_one(number, index, page)
            elif copy is not None:
                own = lease.pages[number][index]
                self._write(number, [own], copy[None])
                self._published += groups[number].publish(own, key)
        return True

    # ---- commit ------------------------------------------------------------------------------

    def commit(self, sequence: SequenceState) -> bool:
        """After a step that filled a page of ``sequence``: publish what may be, and give back what
        lies behind the windows. Whether anything was published.
        """
        use, computed = sequence.prefix, sequence.computed
        full = computed // self._size
        sequence.boundary = (full + 1) * self._size
        before = self._published
        last = min(full, use.publishable)
        if last > use.done:
            if sequence.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR):
                keys = use.chain.extend(sequence.tokens, last)
                for group, pages in zip(self._pool.groups, sequence.lease.pages, strict=True):
                    for index in range(use.done, last):
                        self._published += group.publish(pages[index], keys[index])
            use.done = last
        for number, window in self._windows:
            sequence.lease.leave_behind(number, self._first(window, computed))
        return self._published > before

    def left(self, sequence: SequenceState) -> None:
        """After a sequence gave its pages back: count that as the last use of those, too, that it
        had left behind a window. All groups then forget a prefix from its end.
        """
        keys = sequence.prefix.chain.keys[: sequence.prefix.done]
        for number, _ in self._windows:
            self._pool.groups[number].touch(reversed(keys))

    # ---- following ---------------------------------------------------------------------------

    def adopt(self, sequence: SequenceState) -> int:
        """Let a prefilling sequence take pages that were published since it last looked. How many
        tokens it gains.
        """
        use = sequence.prefix
        index, offset = divmod(sequence.computed, self._size)
        if offset or index >= use.reusable or use.seen == self._published:
            return 0
        use.seen = self._published
        keys = use.chain.keys
        first = index
        while index < use.reusable:
            pages = [group.find(keys[index]) for group in self._pool.groups]
            if None in pages:
                break
            sequence.lease.replace(index, [page for page in pages if page is not None])
            index += 1
        if index == first:
            return 0
        gained = (index - first) * self._size
        sequence.take_computed(gained)
        use.done = max(use.done, index)
        self._reused += gained
        self._followed += gained
        self.commit(sequence)
        return gained

    def followers(self, residents: Iterable[SequenceState]) -> set[int]:
        """Slots of the prefilling residents whose next page an earlier one is about to fill.

        It pays them to wait: the page then costs them nothing, and where prompts share a budget,
        oldest first, they would hardly have got ahead. The first of a prefix never waits.
        """
        filling: set[bytes] = set()
        waiting: set[int] = set()
        prefilling = [one for one in residents if one.prefilling]
        if len(prefilling) < 2:
            return waiting
        for sequence in prefilling:
            use = sequence.prefix
            index, offset = divmod(sequence.computed, self._size)
            keys = use.chain.keys
            if not offset and index < use.reusable and keys[index] in filling:
                waiting.add(sequence.ref.slot)
                continue
            last = min(sequence.prefill_end // self._size, use.publishable)
            if last > index:
                filling.update(use.chain.extend(sequence.tokens, last)[index:last])
        return waiting

    # ---- what is known -----------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether prefixes are kept at all."""
        return self._enabled

    def metrics(self, pinned_pages: int = 0) -> ContextCacheMetrics:
        """Any thread: a copy of the counters. Each is exact; together they are no single moment."""
        pool = self._pool
        return ContextCacheMetrics(
            admitted_sequences=self._admitted,
            hit_sequences=self._hits,
            lookup_bypass_sequences=self._bypassed,
            queried_tokens=self._queried,
            reused_tokens=self._reused,
            followed_tokens=self._followed,
            published_pages=self._published,
            evicted_pages=pool.evicted,
            cached_pages=pool.cached_pages,
            leased_pages=pool.used_pages,
            pinned_pages=pinned_pages,
            total_pages=sum(group.count for group in pool.groups),
            spilled_pages=0 if self._spill is None else self._spill.spilled,
            restored_pages=0 if self._spill is None else self._spill.restored,
        )
