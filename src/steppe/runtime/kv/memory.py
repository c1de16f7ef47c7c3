"""All memory of computed keys and values that a runtime has, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.errors import ExecutionError
from steppe.runtime.kv.context_cache import ContextCache
from steppe.runtime.kv.layout import cache_layout
from steppe.runtime.kv.pool import PagePool
from steppe.runtime.kv.spill import spill_hook, spill_tier
from steppe.runtime.kv.system_prompts import SystemPrompts

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.backends.base import Backend, Program
    from steppe.runtime.kv.context_cache import ContextCacheConfig
    from steppe.runtime.kv.keys import PageKeys
    from steppe.stepping.cache_metrics import ContextCacheMetrics

__all__ = ["KvMemory"]


class KvMemory:
    """The page pool over a backend's cache, what is found there again, and what is pinned.

    ``num_pages`` of every cache group; the backend has allocated them. ``on_pin(pages)`` is told
    what a system prompt takes away from everybody else. Actor thread only, but for ``metrics``.
    """

    def __init__(
        self,
        backend: Backend,
        program: Program,
        num_pages: int,
        keys: PageKeys,
        config: ContextCacheConfig,
        on_pin: Callable[[int], None],
    ) -> None:
        spill = spill_tier(config, backend)
        hook = None if spill is None else spill_hook(spill, backend)
        self.pool = PagePool([num_pages] * len(backend.groups), backend.page_size, hook)
        windows = [group.spec.window for group in backend.groups]
        self.cache = ContextCache(self.pool, keys, windows, config, spill, backend.write_pages)
        self.system_prompts = SystemPrompts(
            self.pool, self.cache, backend, lambda: cache_layout(program, backend), on_pin
        )

    def metrics(self) -> ContextCacheMetrics | None:
        """Any thread: what the cache has done; None when it is disabled."""
        if not self.cache.enabled:
            return None
        return self.cache.metrics(self.system_prompts.pages)

    def leaks(self) -> list[str]:
        """What an idle runtime should not still hold, in words; empty when clean."""
        found = []
        if used := self.pool.used_pages - self.system_prompts.pages:
            found.append(f"{used} pages are leased")
        try:
            self.pool.verify()
        except ExecutionError as error:
            found.append(str(error))
        return found
