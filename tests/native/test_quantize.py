"""Quantising while packing: the extension does to the bit what numpy states."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.formats.dequant import dequantize
from steppe.formats.quantize import QUANTIZABLE, quantize
from tests.native.blocks import random_blocks
from tests.native.built import _native


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(sorted(QUANTIZABLE)),
    seed=st.integers(0, 2**32 - 1),
    magnitude=st.integers(-9, 2),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 5)),
)
def test_blocks_are_those_of_the_statement(
    dtype: str, seed: int, magnitude: int, shape: tuple[int, int]
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((shape[0], shape[1] * 32)) * 10.0**magnitude
    values[rng.random(values.shape) < 0.1] = 0.0
    values[rng.random(values.shape) < 0.02] *= 30
    values[rng.random(shape[0]) < 0.1] = rng.choice([0.0, -0.0, 1.5])
    rows = np.copysign(values, rng.standard_normal(values.shape)).astype(np.float32)
    np.testing.assert_array_equal(_native.quantized(dtype, rows), quantize(dtype, rows))


@pytest.mark.parametrize("dtype", QUANTIZABLE)
@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
def test_a_packed_matrix_is_the_quantised_one(
    rng: np.random.Generator, source: str, dtype: str
) -> None:
    rows, width = 37, 160
    raw = random_blocks(rng, source, rows, width)
    order = rng.permutation(rows)
    values = dequantize(source, raw, (rows, width))[order]
    blocks = quantize(dtype, values)
    expected = _native.packed(dtype, blocks, rows, width, None)
    np.testing.assert_array_equal(_native.packed(source, raw, rows, width, order, dtype), expected)
    program = _native.Program("", 2, 7, 16)
    number = program.add_weight(source, raw, rows, width, order, dtype)
    np.testing.assert_array_equal(
        program.embedding_table(number), dequantize(dtype, blocks, values.shape)
    )


def test_what_cannot_be_quantised_is_refused(rng: np.random.Generator) -> None:
    program = _native.Program("", 1, 7, 16)
    floats, blocks = (random_blocks(rng, kind, 4, 64) for kind in ("F32", "Q8_0"))
    with pytest.raises(ValueError, match="nothing is quantised to Q6_K"):
        program.add_weight("F32", floats, 4, 64, None, "Q6_K")
    with pytest.raises(ValueError, match="quantised already"):
        program.add_weight("Q8_0", blocks, 4, 64, None, "Q4_1")
    with pytest.raises(ValueError, match="groups of 32"):
        program.add_weight("F32", floats, 16, 16, None, "Q8_0")
    floats.view(np.float32)[5] = np.inf
    with pytest.raises(ValueError, match="not a finite number"):
        program.add_weight("F32", floats, 4, 64, None, "Q8_0")
