"""P26: sequences evicted each other until nobody moved. Runtime part, the blocking loop: every step
says something, the oldest is never a victim, and the work stays near the ideal.
"""

from __future__ import annotations

import pytest

from steppe.request import LLMGenerationRequest
from tests.runtime.asking import ask
from tests.runtime.fakes import assert_clean, fake_runtime, greedy_reference

PROMPT, TOKENS = 8, 40


@pytest.mark.parametrize("sequences", [3, 6])
def test_three_times_the_supply_still_moves_at_every_step(sequences: int) -> None:
    # Each needs 48 tokens; a third of what all need together is there.
    pages = sequences * (PROMPT + TOKENS) // 3 // 8
    runtime, _ = fake_runtime(pages=pages, page_size=8)
    runtime.overcommit = True
    prompts = [bytes([97 + index]) * PROMPT for index in range(sequences)]
    batch = LLMGenerationRequest.batch([ask(list(prompt), TOKENS) for prompt in prompts])
    generation = runtime.begin_generation(batch)
    assert generation is not None
    ended: list[int] = []
    with generation:
        session = generation.session
        session.prime_from_prefill()
        while not session.finished:
            oldest = session.residents[0] if session.residents else None
            session.advance()
            gained = sum(len(delta.token_ids) for _, _, delta in session.last_step.deltas)
            assert gained > 0, "a step in which nobody gained a token"
            finished = [seed.original_index for _, seed, _ in session.last_step.finished]
            ended += finished
            if oldest is not None and oldest.seed.original_index not in finished:
                assert session.residents[0] is oldest, "the oldest was a victim"
        response = runtime.finish_generation(generation)
    assert response is not None
    assert_clean(runtime)
    for prompt, output in zip(prompts, response.outputs, strict=True):
        assert output.token_ids == tuple(greedy_reference(prompt, TOKENS))
    assert ended == sorted(ended), "somebody was overtaken"
    # A prompt that runs again after a preemption is lost work: bounded, per sequence.
    runs = runtime.prefill_metrics.total_runs
    assert sequences < runs <= 4 * sequences
    ideal = sequences * (PROMPT + TOKENS - 1)
    decoded = runtime.generation_metrics.generated_tokens
    assert decoded == sequences * TOKENS
    assert runtime.prefill_metrics.computed_tokens + decoded <= 3 * ideal
