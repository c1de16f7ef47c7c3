"""The spill tier: copies of evicted pages, in bounded host memory or in a file of fixed size.

A copy is whole before the page's own memory is used again, and is read back whole inside one
admission. So the tier never holds a page of the pool, not for a moment, and nothing is ever waited
for: whatever becomes of a copy, the pool has all its pages.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from steppe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from steppe.backends.base import Backend
    from steppe.runtime.kv.context_cache import ContextCacheConfig
    from steppe.runtime.kv.pool import EvictionHook

__all__ = ["RestoreCost", "SpillTier", "spill_hook", "spill_tier"]


class SpillTier:
    """Evicted pages by group and key, the least recently used overwritten first. Actor thread only.

    ``capacity`` bytes in all, shared out so that every group has room for as many pages. With
    ``folder`` they lie in a nameless file there, whose space is taken at once: the disk cannot
    fill up later, and nothing is left behind.

    Raises ConfigError if a page of each group does not fit, or the file cannot be made.
    """

    def __init__(
        self, page_bytes: Sequence[int], capacity: int, folder: Path | None = None
    ) -> None:
        self.pages = capacity // sum(page_bytes)
        """Pages that each group has room for."""
        if self.pages < 1:
            raise ConfigError(
                "spill_memory",
                f"{capacity} bytes do not hold one page, which takes {sum(page_bytes)}",
            )
        self._groups = [_Group(self.pages, size, folder) for size in page_bytes]
        self.spilled = self.restored = self.damaged = 0
        """Pages copied out, copied back, and found not to be what was written."""

    def has(self, group: int, key: bytes) -> bool:
        """Whether there is a copy."""
        return key in self._groups[group].entries

    def put(self, group: int, key: bytes, page: npt.NDArray[np.uint8]) -> None:
        """Keep a copy of a page."""
        self._groups[group].put(key, page)
        self.spilled += 1

    def get(self, group: int, key: bytes) -> npt.NDArray[np.uint8] | None:
        """A page as it was put there, uint8[page_bytes]; None if it is not there, or not any more
        what it was.
        """
        entry = self._groups[group].entries.get(key)
        if entry is None:
            return None
        slot, checksum = entry
        page: npt.NDArray[np.uint8] = self._groups[group].slots[slot]
        if crc32(page.data) != checksum:
            self._groups[group].drop(key)
            self.damaged += 1
            return None
        self._groups[group].entries.move_to_end(key)
        self.restored += 1
        return page


class _Group:
    """One group's slots, and which key is in which, with its checksum; the oldest use first."""

    def __init__(self, count: int, page_bytes: int, folder: Path | None) -> None:
        self.entries: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self.slots = _slots(count, page_bytes, folder)
        self._free = list(range(count))

    def put(self, key: bytes, page: npt.NDArray[np.uint8]) -> None:
        if key in self.entries:
            # A key stands for one content: the copy that is there is the same.
            self.entries.move_to_end(key)
            return
        if self._free:
            slot = self._free.pop()
        else:
            _, (slot, _) = self.entries.popitem(last=False)
        self.slots[slot] = page
        self.entries[key] = (slot, crc32(self.slots[slot].data))

    def drop(self, key: bytes) -> None:
        slot, _ = self.entries.pop(key)
        self._free.append(slot)


def _slots(count: int, page_bytes: int, folder: Path | None) -> npt.NDArray[np.uint8]:
    if folder is None:
        return np.empty((count, page_bytes), np.uint8)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, count * page_bytes)
            # The mapping keeps the file's space; its name is gone already.
            return np.memmap(file, np.uint8, "r+", shape=(count, page_bytes))
    except OSError as error:
        raise ConfigError("spill_folder", f"has no room for the spill file: {error}") from error


class RestoreCost:
    """Whether copying pages back takes less time than computing them anew: both are measured.

    Recent measurements count most. Until a prompt has been computed, restoring is tried.
    """

    WEIGHT = 0.2

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._per_token: float | None = None
        self._per_page: float | None = None

    def computed(self, tokens: int, seconds: float) -> None:
        """A step of that many tokens took so long. Short steps say little about long ones."""
        if tokens >= self._page_size:
            self._per_token = self._blend(self._per_token, seconds / tokens)

    def restored(self, pages: int, seconds: float) -> None:
        """So many pages were copied back in so long."""
        self._per_page = self._blend(self._per_page, seconds / pages)

    def pays(self) -> bool:
        """Whether a page is copied faster than its tokens are computed."""
        if self._per_token is None or self._per_page is None:
            return True
        return self._per_page < self._per_token * self._page_size

    def _blend(self, before: float | None, now: float) -> float:
        return now if before is None else before + self.WEIGHT * (now - before)


def spill_tier(config: ContextCacheConfig, backend: Backend) -> SpillTier | None:
    """The tier that a configuration asks for."""
    if not (config.enabled and config.spill_memory):
        return None
    sizes = [backend.page_bytes(group) for group in range(len(backend.groups))]
    return SpillTier(sizes, config.spill_memory, config.spill_folder)


def spill_hook(spill: SpillTier, backend: Backend) -> EvictionHook:
    """What a pool tells of its evictions: copy the pages out while they are still whole."""

    def on_evict(group: int, evicted: list[tuple[int, bytes]]) -> None:
        new = [(page, key) for page, key in evicted if not spill.has(group, key)]
        if new:
            pages = backend.read_pages(group, [page for page, _ in new])
            for (_, key), data in zip(new, pages, strict=True):
                spill.put(group, key, data)

    return on_evict
