"""The numpy statement of the rules, against generators' known answers and other people's rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from steppe.backends import sampling_rules as rules
from steppe.backends.base import DrawPurpose, History, SampleBatch
from tests.backends.programs import sample_rows

# Known answers that the Random123 library is tested with: counter, key, result.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_philox_gives_the_known_answers() -> None:
    counter, key, expected = (
        np.array(column, np.uint32) for column in zip(*KNOWN_ANSWERS, strict=True)
    )
    np.testing.assert_array_equal(rules.philox4x32(counter, key), expected)


def test_uniform_is_made_of_the_first_two_words() -> None:
    seed = 0x299F31D0_A4093822
    position = 0x05A308D3_243F6A88
    (u,) = rules.uniform(seed, 7, position, DrawPurpose.BONUS)
    counter = np.array([[0x243F6A88, 0x05A308D3, 7, 4]], np.uint32)
    words = rules.philox4x32(counter, np.array([[0xA4093822, 0x299F31D0]], np.uint32))[0]
    bits = (int(words[0]) << 32 | int(words[1])) >> 11
    assert u == bits / 2**53


def test_uniform_is_uniform_and_every_part_of_the_key_matters(rng: np.random.Generator) -> None:
    seeds = rng.integers(0, 2**64, 64, dtype=np.uint64)
    u = rules.uniform(seeds[:, None].repeat(64, 1).ravel(), 0, np.tile(np.arange(64), 64), 0)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    steps = np.abs(np.sort(u) - np.arange(u.size) / u.size)
    assert steps.max() < 2.5 / np.sqrt(u.size)  # Kolmogorov and Smirnov: 7 in a million
    base = (int(seeds[0]), 3, 2**40 + 5, 1)
    variants = [base, *(tuple(v + (i == j) for j, v in enumerate(base)) for i in range(4))]
    variants.append((base[0] ^ 1 << 63, *base[1:]))
    variants.append((*base[:2], 5, base[3]))
    assert len({float(rules.uniform(*variant)[0]) for variant in variants}) == len(variants)


def test_filters_keep_what_transformers_keeps(rng: np.random.Generator) -> None:
    for _ in range(20):
        scores = rng.standard_normal(97) * 3
        k, p = int(rng.integers(1, 97)), float(rng.uniform(0.01, 0.99))
        tensor = torch.from_numpy(scores)[None]
        for ours, theirs in (
            (rules.filter_top_k(scores, k), TopKLogitsWarper(k)),
            (rules.filter_top_p(scores, p), TopPLogitsWarper(p)),
            (rules.filter_min_p(scores, p), MinPLogitsWarper(p)),
        ):
            np.testing.assert_array_equal(ours, theirs(None, tensor)[0].numpy())


def test_equals_at_the_border_stay_by_lowest_id() -> None:
    scores = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert np.flatnonzero(np.isfinite(rules.filter_top_k(scores, 3))).tolist() == [1, 2, 3]
    # e^3 and two of three e^2 are 0.79 of the whole.
    assert np.flatnonzero(np.isfinite(rules.filter_top_p(scores, 0.7))).tolist() == [1, 2, 3]
    assert np.flatnonzero(np.isfinite(rules.filter_top_p(scores, 1e-9))).tolist() == [1]
    assert rules.likeliest(scores.astype(np.float32), 4).tolist() == [1, 2, 3, 4]


def test_filters_that_are_off_change_nothing(rng: np.random.Generator) -> None:
    scores = rng.standard_normal(30)
    for out in (
        rules.filter_top_k(scores, 0),
        rules.filter_top_k(scores, 30),
        rules.filter_top_p(scores, 1.0),
        rules.filter_min_p(scores, 0.0),
    ):
        np.testing.assert_array_equal(out, scores)


def test_repetition_penalty_is_that_of_transformers(rng: np.random.Generator) -> None:
    logits = rng.standard_normal(50).astype(np.float32)
    ids = rng.choice(50, 12, replace=False).astype(np.int32)
    in_prompt = rng.random(12) < 0.5
    counts = np.where(in_prompt, rng.integers(0, 2, 12), 1).astype(np.int32)
    history = History(ids, counts, in_prompt)
    ours = rules.apply_penalties(logits, history, np.float32(1.3), np.float32(0), np.float32(0))
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(
        torch.from_numpy(ids.astype(np.int64))[None], torch.from_numpy(logits.copy())[None]
    )
    np.testing.assert_allclose(ours, theirs[0].numpy(), rtol=1e-6)


def test_frequency_and_presence_count_the_output_only() -> None:
    history = History(
        np.array([4, 1, 2], np.int32), np.array([0, 3, 1], np.int32), np.array([True, True, False])
    )
    out = rules.apply_penalties(
        np.zeros(6, np.float32), history, np.float32(1), np.float32(0.5), np.float32(0.25)
    )
    np.testing.assert_array_equal(out, np.array([0, -1.75, -0.75, 0, 0, 0], np.float32))


def test_arguments_are_left_alone(rng: np.random.Generator) -> None:
    logits = rng.standard_normal(40).astype(np.float32)
    before = logits.copy()
    ids = np.array([3, 5], np.int32)
    rules.apply_bias(logits, (ids, np.ones(2, np.float32)))
    rules.apply_bans(logits, ids)
    rules.apply_mask(logits, np.zeros(2, np.uint32))
    np.testing.assert_array_equal(logits, before)


def test_mask_bits_count_from_the_lowest() -> None:
    allowed = rules.allowed_tokens(np.array([0b101, 1 << 31, 1], np.uint32), 65)
    assert np.flatnonzero(allowed).tolist() == [0, 2, 63, 64]


def test_drawn_tokens_have_the_softmax_distribution(seed: int) -> None:
    logits = np.array([[0.0, 1.0, -1.0, 2.0, 0.5]], np.float32)
    count = 4000
    rows = sample_rows(count, temperature=0.7, seed=seed, position=np.arange(count))
    out = rules.sample_rows(np.repeat(logits, count, 0), SampleBatch(rows))
    weights = np.exp(logits[0].astype(np.float64) / np.float32(0.7))
    expected = weights / weights.sum() * count
    observed = np.bincount(out.sampled, minlength=5)
    assert ((observed - expected) ** 2 / expected).sum() < 33  # chi-square, 4 degrees: 1e-6


def test_tokens_drawn_under_a_mask_have_the_distribution_of_the_allowed(seed: int) -> None:
    logits = np.array([[0.0, 1.0, -1.0, 2.0, 0.5]], np.float32)
    count = 4000
    rows = sample_rows(count, temperature=0.7, seed=seed, position=np.arange(count))
    mask = np.array([0b10111], np.uint32)  # without the likeliest
    batch = SampleBatch(rows, masks=[mask] * count)
    out = rules.sample_rows(np.repeat(logits, count, 0), batch)
    inside = [0, 1, 2, 4]
    weights = np.exp(logits[0, inside].astype(np.float64) / np.float32(0.7))
    expected = weights / weights.sum() * count
    observed = np.bincount(out.sampled, minlength=5)
    assert observed[3] == 0
    assert ((observed[inside] - expected) ** 2 / expected).sum() < 31  # 3 degrees: 1e-6


@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.02}])
def test_without_filters_a_mask_replaces_only_what_it_forbids(
    filters: dict[str, float], rng: np.random.Generator
) -> None:
    logits = rng.standard_normal((300, 40)).astype(np.float32)
    rows = sample_rows(300, temperature=1.0, seed=5, position=np.arange(300), **filters)
    masks = list(rng.integers(1, 2**32, (300, 2), dtype=np.uint32))
    free = rules.sample_rows(logits, SampleBatch(rows)).sampled
    masked = rules.sample_rows(logits, SampleBatch(rows, masks=masks)).sampled
    inside = np.array([rules.allowed_tokens(mask, 40) for mask in masks])
    every = np.arange(300)
    assert inside[every, masked].all()
    kept = inside[every, free]
    assert 50 < kept.sum() < 250
    assert ((free == masked)[kept]).all() == (not filters)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_with_nothing_to_choose_is_minus_one(temperature: float) -> None:
    logits = np.zeros((3, 40), np.float32)
    logits[2, 7] = np.nan
    rows = sample_rows(3, temperature=temperature, num_logprobs=2)
    out = rules.sample_rows(logits, SampleBatch(rows, masks=[np.zeros(2, np.uint32), None, None]))
    assert out.sampled[0] == -1
    assert out.sampled[1] >= 0
    assert out.sampled[2] == -1
    assert out.logprob is not None
    assert out.logprob[0] == -np.inf


def test_logprobs_are_those_of_the_raw_logits(rng: np.random.Generator) -> None:
    logits = rng.standard_normal((2, 33)).astype(np.float32)
    bias = (np.array([9], np.int32), np.array([100], np.float32))
    rows = sample_rows(2, num_logprobs=[3, -1])
    out = rules.sample_rows(logits, SampleBatch(rows, bias=[bias, bias]))
    assert out.sampled.tolist() == [9, 9]
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    assert out.logprob is not None
    assert out.top_ids is not None
    assert out.top_logprobs is not None
    np.testing.assert_allclose(out.logprob, [expected[0, 9], -np.inf], rtol=1e-6)
    assert out.top_ids.tolist() == [np.argsort(-logits[0])[:3].tolist(), [-1, -1, -1]]
    np.testing.assert_allclose(out.top_logprobs[0], expected[0, out.top_ids[0]], rtol=1e-6)
