"""Random requests, and engines over the two real backends that answer them, for promise 4."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from steppe import LLMGenerationRequest, SamplingParams
from steppe.backends.select import create_backend
from steppe.runtime.artifacts import load_artifacts
from steppe.runtime.config import RuntimeConfig
from steppe.runtime.kv.context_cache import ContextCacheConfig
from steppe.runtime.rank_runtime import LLMRankRuntime

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

LONGEST = 220
"""Tokens of the longest sequence that ``draw_requests`` gives."""


def draw_requests(rng: np.random.Generator, count: int) -> list[LLMGenerationRequest]:
    """Greedy and seeded, with every kind of limit, penalty and stop, alone and in several."""

    def maybe(chance: float, value: Any, other: Any) -> Any:
        return value if rng.random() < chance else other

    requests = []
    shared = rng.integers(0, 256, 140).tolist()
    for number in range(count):
        # A third begin alike, for a page or two: what is cached, or computed by another meanwhile.
        begin = maybe(0.33, shared[: int(rng.integers(64, 140))], [])
        prompt = begin + rng.integers(0, 256, int(rng.integers(1, 90 - len(begin) // 2))).tolist()
        params = SamplingParams(
            temperature=maybe(0.3, 0.0, float(rng.uniform(0.3, 1.5))),
            top_p=maybe(0.5, 1.0, float(rng.uniform(0.2, 1.0))),
            top_k=maybe(0.5, 0, int(rng.integers(1, 60))),
            min_p=maybe(0.7, 0.0, float(rng.uniform(0.0, 0.2))),
            repetition_penalty=maybe(0.6, 1.0, float(rng.uniform(1.0, 1.6))),
            presence_penalty=maybe(0.7, 0.0, float(rng.uniform(-1, 1))),
            frequency_penalty=maybe(0.7, 0.0, float(rng.uniform(-1, 1))),
            logit_bias=maybe(0.7, None, {int(i): 4.0 for i in rng.integers(0, 256, 3)}),
            seed=number,
            max_tokens=int(rng.integers(1, 60)),
            min_tokens=0,
            stop=maybe(0.5, (), (chr(int(rng.integers(97, 123))), "zz")),
            stop_token_ids=maybe(0.7, (), tuple(rng.integers(0, 256, 2).tolist())),
            ignore_eos=bool(rng.random() < 0.5),
            logprobs=maybe(0.5, None, int(rng.integers(0, 6))),
            prompt_logprobs=maybe(0.8, None, 1),
            n=maybe(0.85, 1, 3),
        )
        requests.append(
            LLMGenerationRequest(
                prompt,
                params=params,
                cache_lookup=maybe(0.9, "use", "bypass"),
                cache_commit=maybe(0.8, "all", maybe(0.5, "prompt", "none")),
                cache_salt=maybe(0.8, "", "mine"),
            )
        )
    return requests


def page_size_of(backend: str) -> int:
    """Tokens of a page here: few in torch, so that there are many; native has no choice."""
    return 8 if backend == "torch" else 64


@cache
def page_bytes(model: Path, backend: str, kv_dtype: str) -> int:
    """Bytes of one page of every cache group."""
    return rank_for(model, backend, kv_dtype, kv_memory=2**22).page_bytes


def rank_for(
    model: Path,
    backend: str,
    kv_dtype: str = "auto",
    *,
    pages: int | None = None,
    kv_memory: int | None = None,
    seats: int = 32,
    cached: bool = True,
    spilled_pages: int = 0,
    spill_folder: Path | None = None,
) -> LLMRankRuntime:
    """A fresh runtime. ``pages`` of each cache group and room for ``spilled_pages`` beside them."""
    size = 0 if pages is None else page_bytes(model, backend, kv_dtype)
    rank = LLMRankRuntime(
        artifacts=load_artifacts(model),
        backend=create_backend(backend, threads=1, page_size=page_size_of(backend)),
        config=RuntimeConfig(
            max_batch_size=seats,
            kv_memory=kv_memory if pages is None else pages * size,
            kv_dtype=kv_dtype,
            context_cache=ContextCacheConfig(cached, spilled_pages * size, spill_folder),
        ),
    )
    assert pages is None or rank.pool.capacity == pages
    return rank
