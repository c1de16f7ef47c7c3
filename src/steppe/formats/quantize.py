"""Quantisation in numpy: float32 values become ggml blocks of 32.

The statement of what ``--quantize`` does. The native backend does the same to the bit, faster:
every operation is one rounded float32 operation, and sums run over eight lanes in a fixed order.

``Q8_0``: the scale is the largest magnitude over 127. ``Q4_1``: a scale and a minimum. Of twelve
lines, the one through the extremes and eleven least-squares fits to guesses with a slightly wider
or narrower step, the one with the least squared error is taken, as stored in half precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from steppe.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["QUANTIZABLE", "quantize"]

QUANTIZABLE: Final = {"Q8_0": 34, "Q4_1": 20}
"""The types that exist here, and the bytes of a block of 32 values."""

_GROUP: Final = 32
_CHUNK_GROUPS: Final = 1 << 13

_F = np.float32


def quantize(dtype: str, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Blocks of ``dtype`` for float32 ``values`` [rows, whole groups of 32], as bytes, 1-D.

    Raises `CheckpointError` for values that are not finite, or too large for a half-precision
    scale.
    """
    groups = np.ascontiguousarray(values, np.float32).reshape(-1, _GROUP)
    if not np.isfinite(groups).all():
        raise CheckpointError("a weight is not a finite number and cannot be quantised")
    encode = {"Q8_0": _q8_0, "Q4_1": _q4_1}[dtype]
    out = np.empty((len(groups), QUANTIZABLE[dtype]), np.uint8)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start in range(0, len(groups), _CHUNK_GROUPS):
            end = start + _CHUNK_GROUPS
            encode(groups[start:end], out[start:end])
    heads = out[:, : 2 if dtype == "Q8_0" else 4].copy().view(np.float16)
    if not np.isfinite(heads).all():
        raise CheckpointError("a weight is too large to be quantised")
    return out.reshape(-1)


def _half(values: NDArray[Any]) -> NDArray[np.float32]:
    return values.astype(np.float16).astype(np.float32)


def _bytes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    return values.astype(np.float16)[:, None].view(np.uint8)


def _total(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sums of 32: eight lanes of four, then the lanes in pairs."""
    lanes = values.reshape(-1, 4, 8)
    sums = ((lanes[:, 0] + lanes[:, 1]) + lanes[:, 2]) + lanes[:, 3]
    pairs = sums[:, 0::2] + sums[:, 1::2]
    fours = pairs[:, 0::2] + pairs[:, 1::2]
    total: NDArray[np.float32] = fours[:, 0] + fours[:, 1]
    return total


def _q8_0(x: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
    scale = np.abs(x).max(axis=1) / _F(127)
    d = _half(scale)[:, None]
    quants = np.rint(np.divide(x, d, out=np.zeros_like(x), where=d != 0))
    out[:, :2] = _bytes(scale)
    out[:, 2:] = np.clip(quants, -127, 127).astype(np.int8).view(np.uint8)


def _fit(x: Any, d: Any, m: Any) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Quants on the line ``d q + m``, and the sum of the squared errors."""
    inverse = np.divide(_F(1), d, out=np.zeros_like(d), where=d != 0)
    quants = np.rint(np.clip((x - m[:, None]) * inverse[:, None], _F(0), _F(15)))
    errors = x - (d[:, None] * quants + m[:, None])
    return quants, _total(errors * errors)


def _q4_1(x: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
    # Of two zeros, the positive one.
    low, high = x.min(axis=1) + _F(0), x.max(axis=1) + _F(0)
    spread = high - low
    d, m = _half(spread / _F(15)), _half(low)
    quants, error = _fit(x, d, m)
    for candidate in range(11):
        steps = _F(14) + _F(0.2) * _F(candidate)
        inverse = np.divide(steps, spread, out=np.zeros_like(spread), where=spread > 0)
        guess = np.rint(np.clip((x - low[:, None]) * inverse[:, None], _F(0), _F(15)))
        sums, levels = _total(x), _total(guess)
        squares, mixed = _total(guess * guess), _total(x * guess)
        det = _F(32) * squares - levels * levels
        known = (det > 0) & (spread > 0)
        slope = np.divide(_F(32) * mixed - sums * levels, det, out=np.zeros_like(det), where=known)
        trial_d, trial_m = _half(slope), _half((sums - slope * levels) / _F(32))
        trial, trial_error = _fit(x, trial_d, trial_m)
        better = known & (trial_d > 0) & (trial_error < error)
        d, m = np.where(better, trial_d, d), np.where(better, trial_m, m)
        error = np.where(better, trial_error, error)
        quants = np.where(better[:, None], trial, quants)
    out[:, :2], out[:, 2:4] = _bytes(d), _bytes(m)
    levels8 = quants.astype(np.uint8)
    out[:, 4:] = levels8[:, :16] | levels8[:, 16:] << 4
