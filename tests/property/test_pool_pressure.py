"""Pools of odd and hopeless sizes under an engine that overcommits: nobody starves, little is lost.

The fake backend reads its cache back, so a page that was given to two would show in the tokens.
"""

from __future__ import annotations

import random

import pytest

from steppe.engine.config import EngineConfig
from steppe.engine.request_engine import RequestEngine
from steppe.errors import ContextLengthError
from steppe.request import LLMGenerationRequest
from steppe.runtime.inference_runtime import LLMInferenceRuntime
from tests.runtime.asking import ask
from tests.runtime.fakes import fake_runtime, greedy_reference


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    ("pages", "page_size"), [(69, 16), (7, 8), (11, 3), (24, 1), (3, 16), (2, 17)]
)
@pytest.mark.parametrize("scheduling", ["fcfs", "fair"])
def test_everybody_ends_and_preemptions_are_bounded(
    seed: int, pages: int, page_size: int, scheduling: str, cache: bool
) -> None:
    rng = random.Random(seed)
    rank, _ = fake_runtime(pages=pages, page_size=page_size, max_batch_size=6, cache=cache)
    runtime = LLMInferenceRuntime(rank)
    runtime.set_overcommit(True)
    config = EngineConfig(
        max_batch_size=6,
        max_step_tokens=rng.choice([1, 5, 64]),
        scheduling=scheduling,  # type: ignore[arg-type]
    )
    engine = RequestEngine.from_factory(runtime.begin_stepped, config, manual=True)
    room = min(runtime.context_length, pages * page_size)
    wanted = []
    for number in range(14):
        length = rng.randint(1, room - 1)
        # Half of them begin alike, and follow each other or find what others left.
        prompt = [98] * length if rng.random() < 0.5 else [99 + number] * length
        wanted.append((prompt, rng.randint(1, min(room - length, 40))))
    handles = [engine.submit(ask(prompt, count)) for prompt, count in wanted]
    quiet = 0
    while True:
        before = engine.metrics().tokens + rank.prefill_metrics.computed_tokens
        if not engine.tick():
            break
        rank.pool.verify()
        moved = engine.metrics().tokens + rank.prefill_metrics.computed_tokens > before
        quiet = 0 if moved else quiet + 1
        assert quiet < 20, "twenty steps in which nothing was computed"
    total = 0
    for handle, (prompt, count) in zip(handles, wanted, strict=True):
        tokens = handle.get(timeout=0).token_ids
        assert tokens == tuple(greedy_reference(prompt, count))
        total += count
    metrics = engine.metrics()
    assert metrics.preemptions <= total, "more preemptions than tokens"
    ideal = sum(len(prompt) + count for prompt, count in wanted)
    assert rank.prefill_metrics.computed_tokens <= 4 * ideal
    assert engine.leaks() == []
    engine.shutdown()


def test_the_trigger_of_the_report_and_its_neighbours() -> None:
    """69 pages of 16: what fits by a token is served, what does not is told so at once."""
    rank, backend = fake_runtime(pages=69, page_size=16, context=2000)
    runtime = LLMInferenceRuntime(rank)
    room = 69 * 16
    with pytest.raises(ContextLengthError, match=f"1081 prompt tokens and 24.*1105.*{room}"):
        runtime.validate(ask([98] * 1081, 24))
    assert backend.launches == 0
    batch = [ask([98] * 1000, 24), ask([98] * 1080, 24), ask([98] * 1000, None)]
    for request in batch:
        runtime.validate(request)
    response = rank.handle_request(LLMGenerationRequest.batch(batch))
    assert response is not None
    assert [len(output.token_ids) for output in response.outputs] == [24, 24, room - 1000]
    assert rank.leaks() == []
