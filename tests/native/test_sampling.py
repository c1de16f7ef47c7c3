"""The native sampler draws what the numpy statement of the rules says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from steppe.backends import sampling_rules as rules
from steppe.backends.base import SAMPLE_ROW, SampleBatch, StepOutput
from tests.backends.programs import sample_rows
from tests.backends.test_torch_sampling import assert_same, batches
from tests.native.built import VARIANTS, _native


def natively(isa: str, logits: np.ndarray, batch: SampleBatch) -> StepOutput:
    """The native sampler over all rows."""
    from steppe.backends.native.backend import sample_extras

    rows = batch.rows
    most = min(int(rows["num_logprobs"].max(initial=-1)), logits.shape[1])
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), SAMPLE_ROW.itemsize)
    extras = sample_extras(batch, len(rows))
    sampled, logprob, ids, tops = _native.sample(isa, logits, raw, extras, max(most, 0))
    return StepOutput(sampled, logprob, ids, tops) if most >= 0 else StepOutput(sampled)


@settings(max_examples=100)
@given(batches())
def test_tokens_and_logprobs_are_those_of_the_rules(case: tuple[np.ndarray, SampleBatch]) -> None:
    logits, batch = case
    for isa in VARIANTS:
        assert_same(natively(isa, logits, batch), rules.sample_rows(logits, batch))


@pytest.mark.parametrize("top_p", [0.9, 0.999])
def test_a_flat_distribution_is_sorted_as_far_as_its_mass_reaches(
    rng: np.random.Generator, top_p: float
) -> None:
    logits = (rng.standard_normal((8, 5000)) * 0.01).astype(np.float32)
    rows = sample_rows(
        8, temperature=1.0, top_p=top_p, seed=rng.integers(0, 2**63, 8), num_logprobs=4
    )
    batch = SampleBatch(rows)
    assert_same(natively(VARIANTS[0], logits, batch), rules.sample_rows(logits, batch))


HOWS: tuple[dict[str, float], ...] = ({}, {"min_p": 0.02}, {"top_p": 0.9}, {"top_k": 50})


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_rows_as_long_as_a_real_vocabulary(
    rng: np.random.Generator, how: dict[str, float], spread: float
) -> None:
    """Draws from all of it find their block first, then their token."""
    logits = (rng.standard_normal((16, 49_157)) * spread).astype(np.float32)
    rows = sample_rows(16, temperature=0.8, seed=rng.integers(0, 2**63, 16), **how)
    expected = rules.sample_rows(logits, SampleBatch(rows))
    for isa in VARIANTS:
        assert_same(natively(isa, logits, SampleBatch(rows)), expected)


def test_a_logit_that_is_not_a_number_leaves_nothing_to_choose() -> None:
    logits = np.zeros((2, 100), np.float32)
    logits[1, 57] = np.nan
    for temperature in (0.0, 1.0):
        batch = SampleBatch(sample_rows(2, temperature=temperature))
        for isa in VARIANTS:
            sampled = natively(isa, logits, batch).sampled
            assert sampled[0] >= 0
            assert sampled[1] == -1


def test_draws_are_those_of_the_rules(rng: np.random.Generator) -> None:
    for _ in range(50):
        seed, position = int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(2**40))
        sequence, purpose = int(rng.integers(9)), int(rng.integers(5))
        ours = _native.uniform(seed, sequence, position, purpose)
        assert ours == rules.uniform(seed, sequence, position, purpose)[0]
