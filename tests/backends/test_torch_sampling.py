"""The torch sampler draws what the numpy statement of the rules says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.backends import sampling_rules as rules
from steppe.backends.base import DrawPurpose, History, SampleBatch, StepOutput
from steppe.backends.torch.sampling import sample_rows as torch_sample_rows
from tests.backends.programs import sample_rows


def on_torch(logits: np.ndarray, batch: SampleBatch, chunk: int = 64) -> StepOutput:
    """The torch sampler over chunks of rows, as numpy arrays."""
    parts = []
    for first in range(0, len(logits), chunk):
        tensor = torch.from_numpy(logits[first : first + chunk].copy())
        before = tensor.clone()
        parts.append(torch_sample_rows(tensor, batch, first))
        assert torch.equal(tensor, before) or tensor.isnan().any()  # raw logits are not edited

    def joined(name: str) -> np.ndarray | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors).numpy()

    tokens = joined("tokens")
    assert tokens is not None
    return StepOutput(tokens, joined("logprob"), joined("top_ids"), joined("top_logprobs"))


def assert_same(ours: StepOutput, expected: StepOutput) -> None:
    np.testing.assert_array_equal(ours.sampled, expected.sampled)
    assert (ours.logprob is None) == (expected.logprob is None)
    if expected.logprob is not None:
        np.testing.assert_allclose(ours.logprob, expected.logprob, atol=1e-5)
        np.testing.assert_array_equal(ours.top_ids, expected.top_ids)
        np.testing.assert_allclose(ours.top_logprobs, expected.top_logprobs, atol=1e-5)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, SampleBatch]:
    """Logits [R, vocab] and rows that ask for everything in any mixture."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, vocab = draw(st.integers(1, 6)), draw(st.integers(2, 700))
    logits = rng.standard_normal((count, vocab)) * draw(st.sampled_from([0.1, 3.0, 20.0]))
    if draw(st.booleans()):
        logits = np.round(logits)  # many equals
    rows = sample_rows(count)

    def column(name: str, choices: list[float]) -> None:
        rows[name] = draw(st.lists(st.sampled_from(choices), min_size=count, max_size=count))

    column("temperature", [0.0, 5e-6, 0.3, 1.0, 2.5])
    column("top_p", [1.0, 0.95, 0.5, 1e-6])
    column("top_k", [0, 1, 2, 40, vocab, vocab + 9])
    column("min_p", [0.0, 0.05, 0.9, 1.0])
    column("repetition_penalty", [1.0, 1.3, 0.7])
    column("presence_penalty", [0.0, 0.6, -1.1])
    column("frequency_penalty", [0.0, 0.4, -0.3])
    column("num_logprobs", [-1, 0, 1, 5, vocab + 3])
    column("target", [-1, -1, -1, int(rng.integers(vocab))])
    rows["seed"] = rng.integers(0, 2**64, count, dtype=np.uint64)
    rows["position"] = rng.integers(0, 2**40, count)
    rows["sequence_index"] = rng.integers(0, 8, count)
    rows["purpose"] = rng.choice(list(DrawPurpose), count)

    def some_ids() -> np.ndarray:
        return rng.choice(vocab, int(rng.integers(1, vocab + 1)), replace=False).astype(np.int32)

    def bias() -> tuple[np.ndarray, np.ndarray]:
        ids = some_ids()
        return ids, (rng.standard_normal(ids.size) * 5).astype(np.float32)

    def history() -> History:
        ids = some_ids()
        in_prompt = rng.random(ids.size) < 0.5
        counts = rng.integers(0, 4, ids.size).astype(np.int32)
        return History(ids, np.where(in_prompt, counts, counts + 1).astype(np.int32), in_prompt)

    def mask() -> np.ndarray:
        words = np.full(-(-vocab // 32), 2**32 - 1, np.uint32)  # also past the end
        for _ in range(int(rng.integers(0, 8))):  # from all down to a few
            words &= rng.integers(0, 2**32, words.size, dtype=np.uint32)
        return words if rng.random() < 0.9 else np.zeros_like(words)

    def entries(make) -> list | None:
        if draw(st.booleans()):
            return None
        made = [make() if rng.random() < 0.6 else None for _ in range(count)]
        for entry in made:  # callers may hand out what nobody may write to
            for array in entry if isinstance(entry, tuple) else [entry]:
                if isinstance(array, np.ndarray):
                    array.setflags(write=False)
        return made

    batch = SampleBatch(
        rows,
        bias=entries(bias),
        history=entries(history),
        banned=entries(some_ids),
        masks=entries(mask),
    )
    return logits.astype(np.float32), batch


@settings(max_examples=100)
@given(batches(), st.sampled_from([1, 2, 64]))
def test_tokens_and_logprobs_are_those_of_the_rules(
    case: tuple[np.ndarray, SampleBatch], chunk: int
) -> None:
    logits, batch = case
    assert_same(on_torch(logits, batch, chunk), rules.sample_rows(logits, batch))


@pytest.mark.parametrize("top_p", [0.9, 0.999])
def test_a_flat_distribution_is_sorted_as_far_as_its_mass_reaches(
    rng: np.random.Generator, top_p: float
) -> None:
    logits = (rng.standard_normal((8, 5000)) * 0.01).astype(np.float32)
    rows = sample_rows(
        8, temperature=1.0, top_p=top_p, seed=rng.integers(0, 2**63, 8), num_logprobs=4
    )
    assert_same(on_torch(logits, SampleBatch(rows)), rules.sample_rows(logits, SampleBatch(rows)))


def test_a_row_is_sampled_alike_in_any_company(rng: np.random.Generator) -> None:
    count = 12
    logits = (rng.standard_normal((count, 33_001)) * 2).astype(np.float32)
    rows = sample_rows(
        count,
        temperature=rng.choice([0.0, 0.7, 1.1], count),
        top_p=rng.choice([1.0, 0.9, 0.99], count),
        top_k=rng.choice([0, 0, 50], count),
        min_p=rng.choice([0.0, 0.01], count),
        seed=rng.integers(0, 2**63, count),
        num_logprobs=rng.integers(-1, 6, count),
    )
    before = torch.get_num_threads()
    outs = []
    try:
        for threads, chunk in ((1, 64), (2, 1), (2, 5)):
            torch.set_num_threads(threads)
            outs.append(on_torch(logits, SampleBatch(rows), chunk))
    finally:
        torch.set_num_threads(before)
    for out in outs[1:]:
        for name in ("sampled", "logprob", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(out, name), getattr(outs[0], name))


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_nothing_to_choose_do_not_hurt_the_others(
    fields: dict[str, float], temperature: float
) -> None:
    logits = np.tile(np.arange(40, dtype=np.float32) / 8, (4, 1))
    logits[1] = np.nan
    logits[3, 5] = np.inf
    rows = sample_rows(4, temperature=temperature, seed=3, num_logprobs=0, **fields)
    masks = [None, None, np.zeros(2, np.uint32), None]
    out = on_torch(logits, SampleBatch(rows, masks=masks))
    alone = rules.sample_rows(logits[:1], SampleBatch(rows[:1]))
    assert out.sampled.tolist() == [int(alone.sampled[0]), -1, -1, -1]
    assert out.logprob is not None
    assert out.logprob[1] == -np.inf


def test_no_rows_asked_for_logprobs() -> None:
    out = on_torch(np.zeros((2, 9), np.float32), SampleBatch(sample_rows(2)))
    assert out.sampled.tolist() == [0, 0]
    assert out.logprob is None
    assert out.top_ids is None
