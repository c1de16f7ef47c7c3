"""The cache side of one generation: every lease its sequences hold, returned whatever happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from steppe.runtime.kv.context_cache import ContextCache
    from steppe.runtime.kv.pool import PageLease, PagePool
    from steppe.runtime.kv.prefix import PrefixUse
    from steppe.stepping.types import SlotSeed

__all__ = ["ManagedKVCacheRequest"]


class ManagedKVCacheRequest:
    """Leases of one generation's sequences (seed 002). Actor thread only.

    With ``bypass`` no sequence of this generation reuses a prefix: every token is computed. Leaving
    the context, or ``close``, returns every page still held, so no path of a generation can lose
    one.
    """

    def __init__(self, pool: PagePool, cache: ContextCache, *, bypass: bool = False) -> None:
        self._pool = pool
        self._bypass = bypass
        self.cache = cache
        self._leases: list[PageLease] = []

    @property
    def pool(self) -> PagePool:
        """Where the pages come from."""
        return self._pool

    def look_up(self, seed: SlotSeed) -> PrefixUse:
        """What ``seed`` can reuse at this moment. Changes nothing."""
        return self.cache.look_up(seed, bypass=self._bypass)

    @property
    def leases(self) -> tuple[PageLease, ...]:
        """Leases held now."""
        return tuple(self._leases)

    def acquire(self, num_tokens: int, prefix: PrefixUse | None = None) -> PageLease | None:
        """A lease with room for ``num_tokens`` tokens that begins with the pages which a lookup
        just found; None, and nothing changed, without room.
        """
        lease = self._pool.lease(num_tokens, None if prefix is None else prefix.pages)
        if lease is not None:
            self._leases.append(lease)
        return lease

    def release(self, lease: PageLease) -> None:
        """Return one sequence's pages."""
        self._leases.remove(lease)
        lease.release()

    def close(self) -> None:
        """Return every page. Idempotent."""
        while self._leases:
            self._leases.pop().release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
