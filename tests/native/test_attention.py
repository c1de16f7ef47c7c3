"""The attention kernels, alone, against a dense masked softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.test_attention import dense
from tests.native.blocks import bf16
from tests.native.built import VARIANTS, _native

variants = pytest.mark.parametrize("isa", VARIANTS)
KV_DTYPES = ("bfloat16", "float16", "int8")

# What is rounded besides keys and values: queries and weights to bf16, or to digits, or not at all.
TOLERANCE = {"bfloat16": 5e-3, "float16": 2e-5, "int8": 1e-3}


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """What a cache of that type keeps of keys or values [tokens, heads, dim]: float64."""
    if dtype == "bfloat16":
        return bf16(x).astype(np.float64)
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float64)
    largest = np.abs(x).max(axis=2, keepdims=True)
    scale = largest * np.float32(1 / 127)
    return np.rint(x * (np.float32(127) / largest)) * scale.astype(np.float64)


def pages_for(rng: np.random.Generator, context: int) -> np.ndarray:
    """Pages in random order, among others."""
    count = -(-context // 64)
    return rng.permutation(count + 2)[:count].astype(np.int32)


@variants
@pytest.mark.parametrize("dtype", KV_DTYPES)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    context=st.one_of(st.integers(1, 70), st.integers(71, 500)),
    tokens=st.integers(1, 60),
    heads=st.sampled_from([(1, 1), (4, 1), (9, 3), (6, 2), (20, 1), (3, 3)]),
    dim=st.sampled_from([1, 3, 16, 32, 33, 64, 80, 128, 190]),
    window=st.sampled_from([0, 0, 1, 17, 64, 128, 200]),
    cap=st.sampled_from([0.0, 0.0, 3.0]),
)
def test_attention_is_the_dense_formula_over_what_is_stored(
    isa: str,
    dtype: str,
    seed: int,
    context: int,
    tokens: int,
    heads: tuple[int, int],
    dim: int,
    window: int,
    cap: float,
) -> None:
    rng = np.random.default_rng(seed)
    num_heads, kv_heads = heads
    tokens = min(tokens, context)
    q = rng.standard_normal((tokens, num_heads, dim)).astype(np.float32)
    k, v = rng.standard_normal((2, context, kv_heads, dim)).astype(np.float32)
    pages = pages_for(rng, context)
    if window:  # pages out of every query's window may be gone
        pages[: max(0, context - tokens + 1 - window) // 64] = -1
    scale = dim**-0.5
    tile = int(rng.integers(1, 48 // (num_heads // kv_heads) + 1))
    out = _native.attention(isa, dtype, q, k, v, pages, window, scale, cap, tile, 0)
    seen = bf16(q) if dtype == "bfloat16" else q
    keys, values = stored(k, dtype), stored(v, dtype)
    expected = dense(seen.astype(np.float64), keys, values, scale, window or None, cap or None)
    # A sum may come out small, of large parts: its error is measured by what was added up.
    size = dense(seen.astype(np.float64), keys, np.abs(values), scale, window or None, cap or None)
    allowed = TOLERANCE[dtype] * size + 1e-9
    if dtype == "int8":
        # Weights are rounded to a part of the largest one, which may stand by a value of zero, or
        # next to it: half a unit for each key, in all directions.
        tallest = np.broadcast_to(np.abs(values).max(axis=2, keepdims=True), values.shape)
        peak = dense(q.astype(np.float64), keys, tallest, scale, window or None, cap or None)
        allowed += 4 * context**0.5 * 2**-15 * peak
    assert (np.abs(out - expected) <= allowed).all()


@variants
@pytest.mark.parametrize("dtype", KV_DTYPES)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    context=st.integers(1, 600),
    tokens=st.integers(1, 40),
    window=st.sampled_from([0, 0, 40, 130]),
)
def test_bits_do_not_depend_on_tiles_chunks_parts_or_pages(
    isa: str, dtype: str, seed: int, context: int, tokens: int, window: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = min(tokens, context)
    num_heads, kv_heads, dim = 4, 2, int(rng.choice([20, 32, 64]))
    q = rng.standard_normal((tokens, num_heads, dim)).astype(np.float32)
    k, v = rng.standard_normal((2, context, kv_heads, dim)).astype(np.float32)
    pages = pages_for(rng, context)
    whole = _native.attention(isa, dtype, q, k, v, pages, window, 0.2, 0.0, 24, 0)
    for parts in (0, 1, 2, 3):
        tile = int(rng.integers(1, 25))
        again = _native.attention(
            isa, dtype, q, k, v, pages_for(rng, context), window, 0.2, 0.0, tile, parts
        )
        np.testing.assert_array_equal(again, whole)
    # Keys that come later are not there yet.
    cut = int(rng.integers(1, tokens + 1))
    end = context - tokens + cut
    chunk = _native.attention(
        isa, dtype, q[:cut], k[:end], v[:end], pages_for(rng, end), window, 0.2, 0.0, 7, 0
    )
    np.testing.assert_array_equal(chunk, whole[:cut])
    alone = _native.attention(
        isa, dtype, q[-1:], k, v, pages, window, 0.2, 0.0, 1, int(rng.integers(0, 3))
    )
    np.testing.assert_array_equal(alone, whole[-1:])


@variants
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_large_scores_and_small_ones(rng: np.random.Generator, isa: str, dtype: str) -> None:
    """One key takes all; equal keys share; scores far below the largest vanish."""
    k = np.zeros((200, 1, 32), np.float32)
    k[150, 0, 0] = 300.0
    k[10, 0, 0] = -300.0
    v = rng.standard_normal((200, 1, 32)).astype(np.float32)
    q = np.zeros((1, 1, 32), np.float32)
    q[0, 0, 0] = 10.0
    pages = pages_for(rng, 200)
    out = _native.attention(isa, dtype, q, k, v, pages, 0, 1.0, 0.0, 1, 0)
    np.testing.assert_allclose(out[0, 0], stored(v, dtype)[150, 0], rtol=1e-5, atol=1e-5)
    q[:] = 0.0
    out = _native.attention(isa, dtype, q, k, v, pages, 0, 1.0, 0.0, 1, 0)
    np.testing.assert_allclose(out[0, 0], stored(v, dtype).mean(axis=0)[0], atol=1e-4)


@variants
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_where_it_is_seen_and_nowhere_else(
    rng: np.random.Generator, isa: str, dtype: str, bad: float
) -> None:
    q = rng.standard_normal((40, 2, 32)).astype(np.float32)
    k, v = rng.standard_normal((2, 150, 1, 32)).astype(np.float32)
    pages = pages_for(rng, 150)
    for array, at in ((k, (130, 0, 5)), (v, (130, 0, 5)), (q, (20, 1, 5))):
        kept = array[at]
        array[at] = bad
        out = _native.attention(isa, dtype, q, k, v, pages, 0, 0.2, 0.0, 1, 0)
        array[at] = kept
        finite = np.isfinite(out).all(axis=2)
        if array is q:
            assert not finite[20, 1]
            finite[20, 1] = True
            assert finite.all()
        else:
            assert finite[:20].all()
            # An infinite key may also score minus infinity, and then weighs nothing.
            assert not finite[20:].any() or (array is k and bad == np.inf)


@variants
def test_wrong_shapes_are_refused(isa: str) -> None:
    q, k = np.zeros((1, 1, 8), np.float32), np.zeros((4, 1, 8), np.float32)
    pages = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="kept as float32"):
        _native.attention(isa, "float32", q, k, k, pages, 0, 1.0, 0.0, 1, 0)
    with pytest.raises(ValueError, match="fit"):
        _native.attention(isa, "int8", q, k[:, :, :7], k, pages, 0, 1.0, 0.0, 1, 0)
    with pytest.raises(ValueError, match="pages"):
        _native.attention(isa, "int8", q, k, k, pages[:0], 0, 1.0, 0.0, 1, 0)
