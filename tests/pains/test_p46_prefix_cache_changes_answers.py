"""P46: a cached prefix changed the answer. Runtime part: warm caches, ended by stop strings, full
pools and repeated prompts, against the same requests without a cache.
"""

from __future__ import annotations

import random

import pytest

from steppe.engine.config import EngineConfig
from steppe.engine.request_engine import RequestEngine
from steppe.runtime.inference_runtime import LLMInferenceRuntime
from tests.runtime.asking import ask
from tests.runtime.fakes import fake_runtime, greedy_reference


@pytest.mark.parametrize("pages", [9, 14, 200])
def test_repeated_prompts_answer_alike_however_full_the_pool_is(pages: int, seed: int) -> None:
    rng = random.Random(seed)
    rank, _ = fake_runtime(pages=pages, page_size=8, max_batch_size=4)
    runtime = LLMInferenceRuntime(rank)
    engine = RequestEngine.from_factory(
        runtime.begin_stepped, EngineConfig(max_batch_size=4, max_step_tokens=16), manual=True
    )
    prompts = [[97 + rng.randrange(26) for _ in range(30)] for _ in range(5)]
    # Warm-up answers that end on a stop string, or are cancelled, leave pages behind.
    for prompt in prompts:
        engine.submit(ask(prompt, 20, stop=["a", "e", "i"]))
        engine.submit(ask(prompt, 20)).cancel()
    asked = [(rng.choice(prompts)[: rng.randrange(9, 31)], rng.randrange(1, 9)) for _ in range(40)]
    handles = [engine.submit(ask(prompt, count)) for prompt, count in asked]
    while engine.tick():
        rank.pool.verify()
    for handle, (prompt, count) in zip(handles, asked, strict=True):
        assert handle.get(timeout=0).token_ids == tuple(greedy_reference(prompt, count))
    metrics = runtime.context_cache_metrics
    assert metrics is not None
    assert metrics.reused_tokens > 0
    assert (metrics.evicted_pages > 0) == (pages < 100)
    assert engine.leaks() == []
    engine.shutdown()


def test_a_page_that_was_evicted_is_not_found_by_its_old_name(seed: int) -> None:
    rng = random.Random(seed)
    rank, _ = fake_runtime(pages=5, page_size=8)
    for _ in range(60):
        # Prompts of few letters share many first pages, and each other's places.
        prompt = [97] * 8 * rng.randrange(3) + [98 + rng.randrange(2)] * rng.randrange(1, 14)
        response = rank.handle_request(ask(prompt, 2))
        assert response is not None
        assert response.token_ids == tuple(greedy_reference(prompt, 2))
        rank.pool.verify()
    assert rank.pool.evicted > 0
