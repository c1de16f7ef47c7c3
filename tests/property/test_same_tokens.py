"""Promise 4 on real backends: the same request, the same tokens, to the bit.

Forty random requests are answered one by one, then by an engine that serves them all at once: in
chunks of several sizes, in any order, and in a pool so small that they preempt each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from steppe import EngineConfig, RequestEngine
from steppe.runtime.inference_runtime import LLMInferenceRuntime
from steppe.testing import assert_idle_clean
from tests.property.real_engines import draw_requests, rank_for
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from steppe import LLMGenerationResponse
    from steppe.stepping.cache_metrics import ContextCacheMetrics

REQUESTS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("same") / "tiny")


@pytest.fixture(
    params=[
        "torch",
        "native",
        "native int8",
        "native float16",
        pytest.param("torch int8", marks=pytest.mark.slow),
    ]
)
def backend(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A backend's name, and what it keeps keys and values as."""
    name, _, kv_dtype = request.param.partition(" ")
    return name, kv_dtype or "auto"


def engine_for(
    model: Path,
    backend: tuple[str, str],
    *,
    max_batch_size: int = 32,
    max_step_tokens: int | None = None,
    pages: int | None = None,
    cache: bool = True,
) -> RequestEngine:
    """An engine over a fresh runtime; ``pages`` makes it overcommit a pool of that many."""
    name, kv_dtype = backend
    rank = rank_for(model, name, kv_dtype, pages=pages, seats=max_batch_size, cached=cache)
    config = EngineConfig(
        max_batch_size=max_batch_size,
        max_step_tokens=max_step_tokens,
        overcommit=pages is not None,
    )
    return RequestEngine(LLMInferenceRuntime(rank), config)


@pytest.mark.timeout(900)
def test_forty_requests_get_the_same_in_any_company(
    model: Path, backend: tuple[str, str], rng: np.random.Generator
) -> None:
    requests = draw_requests(rng, REQUESTS)
    with engine_for(model, backend, cache=False) as engine:
        alone = [engine.submit(request).get() for request in requests]
        assert_idle_clean(engine)

    def check(engine: RequestEngine) -> None:
        order = rng.permutation(REQUESTS).tolist()
        handles = {number: engine.submit(requests[number]) for number in order}
        answers: dict[int, LLMGenerationResponse] = {n: h.get() for n, h in handles.items()}
        for number in range(REQUESTS):
            assert answers[number].outputs == alone[number].outputs, number
        assert_idle_clean(engine)

    for step_tokens in (7, 64, None):
        with engine_for(model, backend, max_step_tokens=step_tokens) as engine:
            check(engine)
    with engine_for(model, backend, max_batch_size=3) as engine:
        check(engine)
    # Asked twice, most of it is found: partly evicted, or all there.
    with engine_for(model, backend, pages=60 if backend[0] == "torch" else 10) as engine:
        check(engine)
        check(engine)
        assert found(engine).evicted_pages > 0
        assert found(engine).reused_tokens > 0
    with engine_for(model, backend) as engine:
        check(engine)
        check(engine)
        assert found(engine).hit_sequences >= REQUESTS // 4
        assert found(engine).evicted_pages == 0
    # Room for the longest sequence and little more.
    pages = 28 if backend[0] == "torch" else 5
    for cache in (True, False):
        with engine_for(model, backend, max_step_tokens=33, pages=pages, cache=cache) as engine:
            check(engine)
            assert engine.metrics().preemptions > 0


def found(engine: RequestEngine) -> ContextCacheMetrics:
    """What its cache did."""
    metrics = engine.context_cache_metrics()
    assert metrics is not None
    return metrics
