"""P09: pages were held for an offload that never reported back, until the pool was dry. Here no
page is ever held for a transfer: whatever the tier does, all pages are free when all is over.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from steppe.engine.config import EngineConfig
from steppe.engine.request_engine import RequestEngine
from steppe.errors import RequestCancelledError
from steppe.runtime.inference_runtime import LLMInferenceRuntime
from steppe.runtime.kv.spill import SpillTier
from tests.runtime.asking import ask
from tests.runtime.fakes import fake_runtime, greedy_reference

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@pytest.mark.parametrize("delivers", ["nothing", "garbage"])
def test_a_tier_that_never_delivers_costs_no_page(
    monkeypatch: pytest.MonkeyPatch, seed: int, delivers: str
) -> None:
    rng = random.Random(seed)
    real = SpillTier.get

    def get(tier: SpillTier, group: int, key: bytes) -> npt.NDArray[np.uint8] | None:
        if delivers == "nothing":
            return None
        for one in tier._groups:
            one.slots[:] = 3
        return real(tier, group, key)

    monkeypatch.setattr(SpillTier, "get", get)
    rank, _ = fake_runtime(pages=10, max_batch_size=4, spill=30 * 2 * 64)
    runtime = LLMInferenceRuntime(rank)
    engine = RequestEngine.from_factory(
        runtime.begin_stepped, EngineConfig(max_batch_size=4, max_step_tokens=16), manual=True
    )
    handles = []
    for _ in range(40):
        prompt = [97 + rng.randrange(4)] * rng.randrange(20, 40)
        handles.append((engine.submit(ask(prompt, 6)), prompt))
        engine.tick()
        if rng.random() < 0.3:
            rng.choice(handles)[0].cancel()
    while engine.tick():
        rank.pool.verify()
    for handle, prompt in handles:
        try:
            assert handle.get(timeout=0).token_ids == tuple(greedy_reference(prompt, 6))
        except RequestCancelledError:
            continue
    metrics = rank.context_cache_metrics
    assert metrics is not None
    assert metrics.spilled_pages > 0
    assert rank.pool.free_pages == rank.pool.capacity
    assert engine.leaks() == []
    engine.shutdown()
