"""Quantisation: the blocks are the format's, and the errors as small as the format allows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from steppe.errors import CheckpointError
from steppe.formats.dequant import dequantize
from steppe.formats.quantize import QUANTIZABLE, quantize

DISTRIBUTIONS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy": lambda rng, shape: rng.standard_t(3, shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 3, shape),
    "offset": lambda rng, shape: 5 + rng.standard_normal(shape),
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-5,
}


def error(dtype: str, raw: np.ndarray, values: np.ndarray) -> float:
    return float(np.square(dequantize(dtype, raw, values.shape).astype(float) - values).mean())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", QUANTIZABLE)
def test_errors_are_bounded(rng: np.random.Generator, dtype: str, name: str) -> None:
    values = DISTRIBUTIONS[name](rng, (37, 96)).astype(np.float32)
    raw = quantize(dtype, values)
    assert raw.dtype == np.uint8
    assert raw.size == 37 * 3 * QUANTIZABLE[dtype]
    groups = values.reshape(-1, 32).astype(float)
    back = dequantize(dtype, raw, values.shape).reshape(-1, 32).astype(float)
    spread = groups.max(axis=1) - groups.min(axis=1)
    largest = np.abs(groups).max(axis=1)
    # Half a step for the rounding, and what half precision does to scale and minimum; under 2^-14 a
    # half has fewer bits than ten.
    allowed = largest * 2e-3 + 127 * 2.0**-25
    step = largest / 127 if dtype == "Q8_0" else spread / 15
    if dtype == "Q8_0":
        assert (np.abs(back - groups).max(axis=1) <= 0.5 * step + allowed).all()
    rms = np.sqrt(np.square(back - groups).mean(axis=1))
    assert (rms <= 0.5 * step + allowed).all()


@pytest.mark.parametrize("dtype", QUANTIZABLE)
def test_errors_are_no_larger_than_the_reference_quantiser_s(
    rng: np.random.Generator, dtype: str
) -> None:
    values = rng.standard_normal((64, 256)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[dtype]
    theirs = gguf.quants.quantize(values, kind).reshape(-1).view(np.uint8)
    ours, reference = (error(dtype, raw, values) for raw in (quantize(dtype, values), theirs))
    # The search pays in four bits; eight leave nothing to search for.
    assert ours <= reference * (0.93 if dtype == "Q4_1" else 1.001)


@pytest.mark.parametrize("dtype", QUANTIZABLE)
def test_what_the_format_holds_exactly_is_kept(rng: np.random.Generator, dtype: str) -> None:
    levels = rng.integers(-127, 128, (8, 32)) if dtype == "Q8_0" else rng.integers(0, 16, (8, 32))
    levels[:, :2] = (127, -127) if dtype == "Q8_0" else (0, 15)
    values = np.ldexp(levels.astype(np.float32), -5)
    np.testing.assert_array_equal(dequantize(dtype, quantize(dtype, values), values.shape), values)
    for constant in (0.0, -0.0, 1.0, -2.5):
        flat = np.full((2, 64), constant, np.float32)
        back = dequantize(dtype, quantize(dtype, flat), flat.shape)
        np.testing.assert_allclose(back, flat, rtol=1e-3)


@pytest.mark.parametrize("dtype", QUANTIZABLE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30, -3e38])
def test_what_no_scale_can_hold_is_refused(dtype: str, bad: float) -> None:
    values = np.ones((2, 32), np.float32)
    values[1, 7] = bad
    with pytest.raises(CheckpointError, match=r"cannot be quantised|too large"):
        quantize(dtype, values)
