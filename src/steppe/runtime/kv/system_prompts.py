"""System prompts: prefixes whose pages stay cached for as long as the runtime lives (seed 002).

A pinned prompt is a lease of published pages that nobody gives back. It can be saved, and loaded by
another process with the same model, kernels and layout; what is saved are its tokens and the bytes
of its pages, and its keys are made anew (see ``keys``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.errors import CacheFileError, UnsupportedRequestError
from steppe.runtime.kv.keys import PrefixIdentity
from steppe.runtime.kv.pool import GONE
from steppe.runtime.kv.prefix_file import SavedPrefix, read_prefixes, write_prefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from steppe.backends.base import Backend
    from steppe.runtime.kv.context_cache import ContextCache
    from steppe.runtime.kv.pool import PageLease, PagePool

__all__ = ["SystemPrompts"]


@dataclass(frozen=True, slots=True, eq=False)
class _Pinned:
    """A prompt's full pages."""

    tokens: tuple[int, ...]
    lease: PageLease


class SystemPrompts:
    """The pinned prompts of a runtime. Its thread only, and only between generations.

    ``layout`` says what a page is of; ``on_pin(pages)`` is told how many pages each new pin takes
    from everybody else.
    """

    def __init__(
        self,
        pool: PagePool,
        cache: ContextCache,
        backend: Backend,
        layout: Callable[[], Mapping[str, object]],
        on_pin: Callable[[int], None],
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._backend = backend
        self._layout = layout
        self._on_pin = on_pin
        self._pinned: list[_Pinned] = []

    @property
    def pages(self) -> int:
        """Pages held by pins, over all groups, shared ones once."""
        held = [one.lease.pages for one in self._pinned]
        return sum(
            len({page for pages in held for page in pages[group]} - {GONE})
            for group in range(self._pool.num_groups)
        )

    def known(self, tokens: Sequence[int]) -> bool:
        """Whether that prompt's full pages are pinned."""
        full = tuple(tokens[: len(tokens) // self._pool.page_size * self._pool.page_size])
        return any(one.tokens[: len(full)] == full for one in self._pinned)

    def check_room(self, num_pages: int) -> None:
        """Raise UnsupportedRequestError if pinning so many pages more took over half the pool."""
        held = sum(one.lease.num_pages for one in self._pinned)
        most = self._pool.capacity // 2
        if held + num_pages > most:
            raise UnsupportedRequestError(
                "prompt",
                f"{num_pages} pages beside {held} pinned ones are {held + num_pages}, and system"
                f" prompts may hold {most} of the pool's {self._pool.capacity}",
            )

    def pin(self, tokens: Sequence[int]) -> bool:
        """Keep the published full pages of a prompt. False if some are not in the cache."""
        size = self._pool.page_size
        count = len(tokens) // size
        pages = self._cache.find_pages(PrefixIdentity(), tokens, count)
        if len(pages[0]) < count:
            return False
        lease = self._pool.lease(count * size, pages)
        assert lease is not None, "nothing was allocated"
        self._keep(tuple(tokens[: count * size]), lease)
        return True

    def save(self, path: Path) -> None:
        """Write every pinned prompt to a file, replacing it whole. Raises OSError."""
        write_prefixes(
            path,
            self._layout(),
            [
                SavedPrefix(
                    one.tokens,
                    [
                        self._backend.read_pages(group, [page for page in pages if page != GONE])
                        for group, pages in enumerate(one.lease.pages)
                    ],
                )
                for one in self._pinned
            ],
        )

    def load(self, path: Path) -> int:
        """Pin every prompt of a file; how many there were that were not pinned already.

        Raises CacheFileError for a file that is broken, or of another model or layout,
        UnsupportedRequestError without room: nothing has changed then. Raises OSError.
        """
        saved = [one for one in read_prefixes(path, self._layout()) if not self.known(one.tokens)]
        size = self._pool.page_size
        for one in saved:
            if not one.tokens or len(one.tokens) % size:
                raise CacheFileError(f"{path} holds a prefix that is not of whole pages")
            for group, data in enumerate(one.pages):
                first = self._cache.first_page(group, len(one.tokens))
                if len(data) != len(one.tokens) // size - first:
                    raise CacheFileError(f"{path} lacks pages of a prefix")
        self.check_room(sum(len(one.tokens) // size for one in saved))
        for one in saved:
            if not self.pin(one.tokens):
                self._restore(one)
        return len(saved)

    def _restore(self, saved: SavedPrefix) -> None:
        """Write a saved prefix into fresh pages, publish and keep them."""
        tokens = saved.tokens
        lease = self._pool.lease(len(tokens))
        if lease is None:
            raise UnsupportedRequestError("prompt", "the page pool has no room for it now")
        count = lease.num_pages
        for group, data in enumerate(saved.pages):
            first = self._cache.first_page(group, len(tokens))
            lease.leave_behind(group, first)
            self._backend.write_pages(group, lease.pages[group][first:], data)
        self._cache.publish_pages(PrefixIdentity(), tokens, count, lease)
        self._keep(tokens, lease)

    def _keep(self, tokens: tuple[int, ...], lease: PageLease) -> None:
        self._pinned.append(_Pinned(tokens, lease))
        self._on_pin(lease.num_pages)
