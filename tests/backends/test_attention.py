"""Paged attention against a dense masked softmax in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.backends.base import StepInput
from steppe.backends.tape import CacheSpec
from steppe.backends.torch.attention import KEY_BLOCK, attend, plan_group
from steppe.backends.torch.cache import Cached
from steppe.backends.torch.ops import padded_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray


def dense(
    q: NDArray[np.float64],
    k: NDArray[np.float64],
    v: NDArray[np.float64],
    scale: float,
    window: int | None,
    cap: float | None,
) -> NDArray[np.float64]:
    """One sequence: the last len(q) positions' queries [n, heads, d] over [length, kv_heads, d]."""
    if not len(q):
        return q
    share = q.shape[1] // k.shape[1]
    scores = np.einsum("qhd,khd->hqk", q, k.repeat(share, axis=1)) * scale
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    key = np.arange(len(k))[None]
    query = np.arange(len(k) - len(q), len(k))[:, None]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v.repeat(share, axis=1))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(
        st.tuples(st.integers(0, 150), st.integers(0, 160)), min_size=1, max_size=4
    ).filter(lambda pairs: any(new for new, _ in pairs)),
    page_size=st.sampled_from([1, 3, 16, 64, 200]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    head_dim=st.sampled_from([4, 10, 33]),
    window=st.sampled_from([None, 1, 2, 17, 128, 500]),
    cap=st.sampled_from([None, 3.0]),
)
def test_ragged_batches_attend_as_the_dense_formula(
    seed: int,
    lengths: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    cap: float | None,
) -> None:
    rng = np.random.default_rng(seed)
    num_heads, kv_heads = heads
    contexts = np.array([new + old for new, old in lengths])
    pages = -(-contexts // page_size)
    order = rng.permutation(int(pages.sum()) + 2)
    table = np.full((len(lengths), int(pages.max()) + 1), -1, np.int32)
    shape = (order.size * page_size, kv_heads, head_dim)
    # What no sequence wrote is poison: it must never reach a result.
    keys, values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    queries, expected = [], []
    for number, (new, old) in enumerate(lengths):
        mine, order = order[: pages[number]], order[pages[number] :]
        table[number, : mine.size] = mine
        k, v = rng.standard_normal((2, new + old, kv_heads, head_dim)).astype(np.float32)
        at = np.arange(new + old)
        slots = mine[at // page_size] * page_size + at % page_size
        keys[slots], values[slots] = k, v
        q = rng.standard_normal((new, num_heads, head_dim)).astype(np.float32)
        queries.append(q)
        expected.append(dense(*(a.astype(np.float64) for a in (q, k, v)), 0.3, window, cap))
        if window is not None:  # pages out of every query's window may be gone
            gone = max(0, old - window + 1) // page_size
            table[number, :gone] = -1
            keys[slots[: gone * page_size]] = np.nan
    new = np.array([new for new, _ in lengths])
    step = StepInput(
        token_ids=np.zeros(new.sum(), np.int32),
        positions=np.zeros(new.sum(), np.int32),
        query_start=np.cumsum([0, *new]).astype(np.int32),
        context_len=contexts.astype(np.int32),
        block_tables=(table,),
        slot_mappings=(np.zeros(new.sum(), np.int64),),
        logit_rows=np.zeros(0, np.int32),
    )
    spec = CacheSpec(kv_heads, head_dim, window)
    plan = plan_group(step, 0, spec, page_size, num_heads, torch.device("cpu"))
    flat = np.concatenate(queries).reshape(new.sum(), -1)
    padded = np.zeros((padded_rows(len(flat)), flat.shape[1]), np.float32)
    padded[: len(flat)] = flat
    out = attend(
        torch.from_numpy(padded),
        Cached(torch.from_numpy(keys), None),
        Cached(torch.from_numpy(values), None),
        plan,
        num_heads=num_heads,
        scale=0.3,
        cap=cap,
    ).numpy()
    reference = np.concatenate(expected).reshape(flat.shape)
    np.testing.assert_allclose(out[: len(flat)], reference, atol=2e-5)
    assert not out[len(flat) :].any()


@pytest.mark.parametrize("length", [KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 3 * KEY_BLOCK + 5])
def test_a_long_prefill_is_cut_into_tiles_of_queries(length: int) -> None:
    step = StepInput(
        token_ids=np.zeros(length, np.int32),
        positions=np.zeros(length, np.int32),
        query_start=np.array([0, length], np.int32),
        context_len=np.array([length], np.int32),
        block_tables=(np.arange(length, dtype=np.int32)[None],),
        slot_mappings=(np.arange(length),),
        logit_rows=np.zeros(0, np.int32),
    )
    plan = plan_group(step, 0, CacheSpec(1, 4, 20), 1, 2, torch.device("cpu"))
    (sequence,) = plan.sequences
    assert sequence.key_slots.numel() % KEY_BLOCK == 0
    covered = [token for tile in sequence.tiles for token in range(tile.first, tile.last)]
    assert covered == list(range(length))
    for tile in sequence.tiles:
        # A window of 20 never needs more blocks than its queries and the one before them.
        assert tile.length <= -(-(tile.last - tile.first + 20) // KEY_BLOCK) * KEY_BLOCK + KEY_BLOCK
        assert tile.offset % KEY_BLOCK == tile.length % KEY_BLOCK == 0
