"""The kernels of every instruction set against a numpy statement of their arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.formats.dequant import dequantize
from steppe.formats.ggml_types import GGML_TYPES
from tests.native.blocks import SCALES, bf16, random_blocks
from tests.native.built import VARIANTS, _native

QUANTISED = sorted(SCALES)
variants = pytest.mark.parametrize("isa", VARIANTS)


def width_of(rng: np.random.Generator, dtype: str) -> int:
    """A width that the type allows, mostly no multiple of what the kernels step by."""
    elements = GGML_TYPES[dtype].elements
    return (
        elements * int(rng.integers(1, 4 if elements == 256 else 9))
        if elements > 1
        else int(rng.integers(1, 200))
    )


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 quants [m, k] and float32 scales [m, k / 32]."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2)
    tiny = largest < np.float32(1e-30)
    scale = np.where(tiny, np.float32(0), largest * np.float32(1 / 127))
    inverse = np.where(tiny, np.float32(0), np.float32(127) / np.where(tiny, 1, largest))
    q = np.rint(groups * inverse.astype(np.float32)[:, :, None]).clip(-127, 127)
    return q.astype(np.int64).reshape(x.shape), scale.astype(np.float32)


@variants
@pytest.mark.parametrize("size", [1e-35, 1e-25, 1e-3, 1.0, 1e4])
def test_activations_are_quantised_as_numpy_says(
    rng: np.random.Generator, isa: str, size: float
) -> None:
    x = (rng.standard_normal((11, 32 * 5)) * size).astype(np.float32)
    x[3, 32:64] = 0.0
    q, scales, sums = _native.quantize(isa, x)
    expected_q, expected_scales = quantised(x)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(q, expected_q)
    totals = expected_q.reshape(11, -1, 32).sum(axis=2).astype(np.float32) * expected_scales
    np.testing.assert_array_equal(sums, totals)


@variants
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["Q4_1", "Q8_0", "Q6_K", "BF16", "F32"])
@pytest.mark.parametrize("count", [9, 37])
def test_what_is_not_finite_stays_so(
    rng: np.random.Generator, isa: str, count: int, dtype: str, bad: float
) -> None:
    data = random_blocks(rng, dtype, 20, 256, zeros=0.0)
    x = rng.standard_normal((count, 256)).astype(np.float32)
    x[4, int(rng.integers(256))] = bad
    out = _native.linear(isa, dtype, data, 20, 256, x, None, None, None)
    assert not np.isfinite(out[4]).any()
    assert np.isfinite(np.delete(out, 4, axis=0)).all()


@pytest.mark.parametrize("dtype", sorted(set(GGML_TYPES) - {"F16"}))
def test_packing_loses_nothing(rng: np.random.Generator, dtype: str) -> None:
    rows, width = int(rng.integers(1, 50)), width_of(rng, dtype)
    data = random_blocks(rng, dtype, rows, width)
    order = rng.permutation(rows).astype(np.int64)
    expected = dequantize(dtype, data, (rows, width))
    np.testing.assert_array_equal(_native.unpacked(dtype, data, rows, width, None), expected)
    np.testing.assert_array_equal(
        _native.unpacked(dtype, data, rows, width, order), expected[order]
    )


def test_half_precision_is_rounded_to_bfloat16(rng: np.random.Generator) -> None:
    data = random_blocks(rng, "F16", 9, 70)
    expected = bf16(dequantize("F16", data, (9, 70)))
    np.testing.assert_array_equal(_native.unpacked("F16", data, 9, 70, None), expected)


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_refused(
    rng: np.random.Generator, dtype: str, scale: float
) -> None:
    width = GGML_TYPES[dtype].elements
    data = random_blocks(rng, dtype, 3, width)
    at = SCALES[dtype][-1] + GGML_TYPES[dtype].nbytes * 2
    data[at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="finite"):
        _native.unpacked(dtype, data, 3, width, None)


def unit_scales(dtype: str, data: np.ndarray) -> np.ndarray:
    """The same blocks with scale 1 and, where there is one, minimum scale 1."""
    kind = GGML_TYPES[dtype]
    raw = data.reshape(-1, kind.nbytes).copy()
    for at in SCALES[dtype]:
        raw[:, at : at + 2] = np.ones(len(raw), np.float16).view(np.uint8).reshape(-1, 2)
    return raw.reshape(-1)


@variants
@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_integer_part_is_exact(rng: np.random.Generator, isa: str, dtype: str) -> None:
    """With integer weights and activations every sum is an integer that float32 holds."""
    rows, width = int(rng.integers(1, 40)), width_of(rng, dtype)
    data = unit_scales(dtype, random_blocks(rng, dtype, rows, width))
    weights = dequantize(dtype, data, (rows, width)).astype(np.int64)
    # Each group holds a 127, so that all scales are 1.
    x = rng.integers(-1, 2, (13, width)).astype(np.float32)
    x[:, ::32] = 127.0
    out = _native.linear(isa, dtype, data, rows, width, x, None, None, None)
    expected = x.astype(np.int64) @ weights.T
    assert np.abs(expected).max() < 2**24
    np.testing.assert_array_equal(out, expected)


@variants
@pytest.mark.parametrize("dtype", sorted(GGML_TYPES))
@pytest.mark.parametrize("most", [16, 150])
def test_a_product_is_what_numpy_computes(
    rng: np.random.Generator, isa: str, dtype: str, most: int
) -> None:
    rows, width = int(rng.integers(1, 50)), width_of(rng, dtype)
    count = int(rng.integers(max(1, most - 130), most))
    data = random_blocks(rng, dtype, rows, width)
    order = rng.permutation(rows).astype(np.int64)
    weights = dequantize(dtype, data, (rows, width))[order].astype(np.float64)
    x = rng.standard_normal((count, width)).astype(np.float32)
    if dtype in SCALES:
        q, scales = quantised(x)
        seen = (q.reshape(count, -1, 32) * scales.astype(np.float64)[:, :, None]).reshape(x.shape)
    else:
        seen = x if dtype == "F32" else bf16(x)
        weights = weights if dtype == "F32" else bf16(weights).astype(np.float64)
    bias = rng.standard_normal(rows).astype(np.float32)
    add = rng.standard_normal((count, rows)).astype(np.float32)
    out = _native.linear(isa, dtype, data, rows, width, x, bias, add, order)
    expected = seen @ weights.T + bias + add
    # Sums of float32 in any order: an error of a few ulp of the magnitudes that are added.
    bound = np.abs(seen) @ np.abs(weights).T + np.abs(bias) + np.abs(add)
    if dtype in ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q2_K"):
        bound += np.abs(seen).sum(axis=1, keepdims=True) * np.abs(weights).max() * 4
    assert (np.abs(out - expected) <= 2e-6 * bound + 1e-12).all()


@variants
@settings(max_examples=15)
@given(data=st.data())
def test_a_row_has_the_same_bits_in_any_company(isa: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    dtype = data.draw(st.sampled_from(sorted(GGML_TYPES)))
    rows, width, count = int(rng.integers(1, 40)), width_of(rng, dtype), int(rng.integers(2, 40))
    weights = random_blocks(rng, dtype, rows, width)
    x = rng.standard_normal((count, width)).astype(np.float32)
    whole = _native.linear(isa, dtype, weights, rows, width, x, None, None, None)
    first = int(rng.integers(count))
    last = int(rng.integers(first + 1, count + 1))
    part = _native.linear(isa, dtype, weights, rows, width, x[first:last], None, None, None)
    np.testing.assert_array_equal(part, whole[first:last])


@pytest.mark.skipif("avx512_amx" not in VARIANTS, reason="this processor has no AMX")
@settings(max_examples=60)
@given(data=st.data())
def test_tiles_and_vectors_give_the_same_bits(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    dtype = data.draw(st.sampled_from(sorted(GGML_TYPES)))
    count = data.draw(st.integers(1, 150))
    rows, elements = int(rng.integers(1, 300)), GGML_TYPES[dtype].elements
    width = elements * int(rng.integers(1, -(-2500 // elements)))
    weights = random_blocks(rng, dtype, rows, width)
    x = (rng.standard_normal((count, width)) * 10.0 ** rng.uniform(-6, 3)).astype(np.float32)
    bias = rng.standard_normal(rows).astype(np.float32)
    add = rng.standard_normal((count, rows)).astype(np.float32)
    tiles, vectors = (
        _native.linear(isa, dtype, weights, rows, width, x, bias, add, None)
        for isa in ("avx512_amx", "avx512_vnni")
    )
    np.testing.assert_array_equal(tiles.view(np.int32), vectors.view(np.int32))


def test_wrong_shapes_are_refused(rng: np.random.Generator) -> None:
    data = random_blocks(rng, "Q4_0", 4, 64)
    with pytest.raises(ValueError, match="fit"):
        _native.unpacked("Q4_0", data[:-1], 4, 64, None)
    with pytest.raises(ValueError, match="fit"):
        _native.unpacked("Q4_0", data, 4, 65, None)
    with pytest.raises(ValueError, match="outside"):
        _native.unpacked("Q4_0", data, 4, 64, np.array([0, 1, 2, 4]))
    with pytest.raises(ValueError, match="kernels"):
        _native.quantize("mmx", np.zeros((1, 32), np.float32))
