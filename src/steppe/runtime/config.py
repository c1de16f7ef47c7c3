"""How big a runtime is: seats, context, pages."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from steppe.backends.base import KV_DTYPES
from steppe.errors import ConfigError
from steppe.runtime.kv.context_cache import ContextCacheConfig
from steppe.runtime.kv.pool import pages_for

if TYPE_CHECKING:
    from steppe.backends.base import Backend

__all__ = ["RuntimeConfig", "pool_pages"]

DEFAULT_KV_MEMORY = 2 * 2**30
"""Most bytes the page pool takes unless told otherwise."""


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Sizes of one runtime. ``kv_memory`` in bytes; None takes what the seats can use, at most 2
    GiB and a quarter of the free memory. ``kv_dtype`` is what keys and values are kept as, one of
    ``KV_DTYPES``: auto is the backend's own choice, int8 holds nearly twice the tokens of two-byte
    types in the same memory. ``max_step_tokens`` bounds the tokens of a blocking step.

    Raises ConfigError naming the field.
    """

    max_batch_size: int = 32
    max_model_len: int | None = None
    kv_memory: int | None = None
    kv_dtype: str = "auto"
    max_step_tokens: int = 512
    context_cache: ContextCacheConfig = field(default_factory=ContextCacheConfig)

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_model_len", "kv_memory", "max_step_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value < 1):
                raise ConfigError(name, f"must be at least 1, not {value!r}")
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(
                "kv_dtype", f"must be one of {', '.join(KV_DTYPES)}, not {self.kv_dtype!r}"
            )


def pool_pages(config: RuntimeConfig, backend: Backend, context_length: int) -> int:
    """Pages of each cache group that ``config`` pays for.

    Raises ConfigError when the memory does not hold a single page of every group.
    """
    page_bytes = sum(backend.page_bytes(group) for group in range(len(backend.groups)))
    wanted = config.max_batch_size * pages_for(context_length, backend.page_size)
    memory = config.kv_memory
    if memory is None:
        one = pages_for(context_length, backend.page_size) * page_bytes
        memory = max(min(DEFAULT_KV_MEMORY, _free_memory() // 4), min(one, DEFAULT_KV_MEMORY))
    pages = min(wanted, memory // page_bytes)
    if pages < 1:
        raise ConfigError(
            "kv_memory", f"{memory} bytes do not hold one page, which takes {page_bytes}"
        )
    return pages


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
