"""P43: a seed was ignored when a neighbour had none. Draws belong to (seed, sequence, position)."""

from __future__ import annotations

import pytest

from steppe.request import LLMGenerationRequest
from tests.runtime.asking import ask
from tests.runtime.fakes import fake_runtime
from tests.runtime.reference import answer

SEEDED = ask("target", 10, temperature=1.5, seed=42, logprobs=1)
ALONE = answer(b"target", SEEDED.params)


@pytest.mark.parametrize(
    "neighbours",
    [
        [],
        [ask("other", 10, temperature=1.5, seed=42)],
        [ask("other", 10, temperature=1.5, seed=7)],
        [ask("other", 10, temperature=1.5)],
        [ask("other", 10)],
        [ask("target", 10, temperature=1.5)],
        [ask("long neighbour", 3, temperature=1.5) for _ in range(3)],
    ],
    ids=["alone", "same seed", "seeded", "unseeded", "greedy", "twin without a seed", "several"],
)
@pytest.mark.parametrize("last", [False, True])
def test_a_seeded_request_draws_the_same_in_any_company(
    neighbours: list[LLMGenerationRequest], last: bool
) -> None:
    runtime, _ = fake_runtime()
    batch = [*neighbours, SEEDED] if last else [SEEDED, *neighbours]
    response = runtime.handle_request(LLMGenerationRequest.batch(batch))
    assert response is not None
    ALONE.check(response.outputs[batch.index(SEEDED)])


def test_it_draws_the_same_after_preemptions() -> None:
    runtime, _ = fake_runtime(pages=4, page_size=8)
    runtime.overcommit = True
    batch = [ask("neighbour", 20, temperature=1.0), SEEDED, ask("another", 10, temperature=1.0)]
    response = runtime.handle_request(LLMGenerationRequest.batch(batch))
    assert response is not None
    assert runtime.prefill_metrics.total_runs > 3, "nobody was preempted"
    ALONE.check(response.outputs[1])


def test_unseeded_neighbours_do_not_share_their_draws() -> None:
    runtime, _ = fake_runtime()
    twins = [ask("twin", 10, temperature=1.5) for _ in range(4)]
    response = runtime.handle_request(LLMGenerationRequest.batch(twins))
    assert response is not None
    assert len({output.token_ids for output in response.outputs}) == 4


def test_one_seed_and_one_prompt_is_one_answer_but_n_are_n() -> None:
    runtime, _ = fake_runtime()
    response = runtime.handle_request(LLMGenerationRequest.batch([SEEDED, SEEDED]))
    assert response is not None
    assert response.outputs[0].token_ids == response.outputs[1].token_ids
    several = runtime.handle_request(ask("target", 10, temperature=1.5, seed=42, n=3))
    assert several is not None
    assert len({output.token_ids for output in several.outputs}) == 3
    assert several.token_ids == ALONE.token_ids
