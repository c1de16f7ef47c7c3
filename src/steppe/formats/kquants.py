"""Decoders of the 256-value super-blocks (Q2_K to Q6_K, IQ4_XS) and of IQ4_NL.

Each decoder takes ``blocks``, a structured array of shape ``(n,)``, and fills ``out``, float32 of
shape ``(n, values per block)``. Every product and sum is one float32 operation in the order the
format's reference defines (scale times sub-scale, times value, minus minimum), so results are
bit-equal to it. Source: the block structures of ggml.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "IQ4_NL",
    "IQ4_XS",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "decode_iq4_nl",
    "decode_iq4_xs",
    "decode_q2_k",
    "decode_q3_k",
    "decode_q4_k",
    "decode_q5_k",
    "decode_q6_k",
]

Blocks = NDArray[Any]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

Q2_K: Final = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
Q3_K: Final = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
Q4_K: Final = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
Q5_K: Final = np.dtype(
    [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]
)
Q6_K: Final = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])
IQ4_NL: Final = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
IQ4_XS: Final = np.dtype(
    [("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)]
)

# The sixteen levels of the non-linear 4-bit types (ggml's kvalues_iq4nl).
_LEVELS: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)


def _column(scale: NDArray[np.float16]) -> Floats:
    return scale.astype(np.float32)[:, None]


def _six_bit_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """The 8 scales and 8 minimums that Q4_K and Q5_K pack into 12 bytes, both ``(n, 8)``."""
    first, second, mixed = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.empty((packed.shape[0], 8), dtype=np.float32)
    minimums = np.empty_like(scales)
    scales[:, :4] = first & 63
    scales[:, 4:] = (mixed & 15) | (first >> 6 << 4)
    minimums[:, :4] = second & 63
    minimums[:, 4:] = (mixed >> 4) | (second >> 6 << 4)
    return scales, minimums


def decode_q2_k(blocks: Blocks, out: Floats) -> None:
    n = blocks.shape[0]
    halves = np.ascontiguousarray(blocks["qs"]).reshape(n, 2, 32)
    values = out.reshape(n, 2, 4, 32)
    for plane in range(4):
        values[:, :, plane] = halves >> (2 * plane) & 3
    scales = blocks["scales"]
    groups = out.reshape(n, 16, 16)
    groups *= (_column(blocks["d"]) * (scales & 15).astype(np.float32))[:, :, None]
    groups -= (_column(blocks["dmin"]) * (scales >> 4).astype(np.float32))[:, :, None]


def decode_q3_k(blocks: Blocks, out: Floats) -> None:
    n = blocks.shape[0]
    halves = np.ascontiguousarray(blocks["qs"]).reshape(n, 2, 32)
    values = out.reshape(n, 2, 4, 32)
    # A clear bit in the mask means "subtract four"; mask bit 4 * half + plane belongs to the plane.
    mask = ~blocks["hmask"]
    shifted = np.stack([mask, mask >> 4], axis=1)
    for plane in range(4):
        low = (halves >> (2 * plane) & 3).astype(np.int8)
        values[:, :, plane] = low - ((shifted >> plane & 1) << 2).astype(np.int8)
    packed = blocks["scales"]
    scales = np.empty((n, 16), dtype=np.int8)
    for group in range(4):
        nibbles = packed[:, 4 * (group % 2) : 4 * (group % 2) + 4] >> (4 * (group // 2)) & 15
        scales[:, 4 * group : 4 * group + 4] = nibbles | (packed[:, 8:] >> (2 * group) & 3) << 4
    scales -= 32
    groups = out.reshape(n, 16, 16)
    groups *= (_column(blocks["d"]) * scales.astype(np.float32))[:, :, None]


def decode_q4_k(blocks: Blocks, out: Floats) -> None:
    n = blocks.shape[0]
    scales, minimums = _six_bit_scales(blocks["scales"])
    packed = np.ascontiguousarray(blocks["qs"]).reshape(n, 4, 32)
    pairs = out.reshape(n, 4, 2, 32)
    pairs[:, :, 0] = packed & 15
    pairs[:, :, 1] = packed >> 4
    groups = out.reshape(n, 8, 32)
    groups *= (_column(blocks["d"]) * scales)[:, :, None]
    groups -= (_column(blocks["dmin"]) * minimums)[:, :, None]


def decode_q5_k(blocks: Blocks, out: Floats) -> None:
    n = blocks.shape[0]
    scales, minimums = _six_bit_scales(blocks["scales"])
    packed = np.ascontiguousarray(blocks["qs"]).reshape(n, 4, 32)
    high = np.ascontiguousarray(blocks["qh"])
    pairs = out.reshape(n, 4, 2, 32)
    for pair in range(4):
        pairs[:, pair, 0] = packed[:, pair] & 15 | (high >> (2 * pair) & 1) << 4
        pairs[:, pair, 1] = packed[:, pair] >> 4 | (high >> (2 * pair + 1) & 1) << 4
    groups = out.reshape(n, 8, 32)
    groups *= (_column(blocks["d"]) * scales)[:, :, None]
    groups -= (_column(blocks["dmin"]) * minimums)[:, :, None]


def decode_q6_k(blocks: Blocks, out: Floats) -> None:
    n = blocks.shape[0]
    low = np.ascontiguousarray(blocks["ql"]).reshape(n, 2, 2, 32)
    high = np.ascontiguousarray(blocks["qh"]).reshape(n, 2, 32)
    values = out.reshape(n, 2, 4, 32)
    for plane in range(4):
        nibbles = low[:, :, plane % 2] >> (4 * (plane // 2)) & 15
        values[:, :, plane] = nibbles | (high >> (2 * plane) & 3) << 4
    out -= np.float32(32)
    groups = out.reshape(n, 16, 16)
    groups *= (_column(blocks["d"]) * blocks["scales"].astype(np.float32))[:, :, None]


def decode_iq4_nl(blocks: Blocks, out: Floats) -> None:
    packed = blocks["qs"]
    out[:, :16] = _LEVELS[packed & 15]
    out[:, 16:] = _LEVELS[packed >> 4]
    out *= _column(blocks["d"])


def decode_iq4_xs(blocks: Blocks, out: Floats) -> None:
    n = blocks.shape[0]
    scales = np.empty((n, 8), dtype=np.int8)
    scales[:, 0::2] = blocks["scales_l"] & 15
    scales[:, 1::2] = blocks["scales_l"] >> 4
    for group in range(8):
        scales[:, group] |= ((blocks["scales_h"] >> (2 * group) & 3) << 4).astype(np.int8)
    scales -= 32
    packed = np.ascontiguousarray(blocks["qs"]).reshape(n, 8, 16)
    groups = out.reshape(n, 8, 32)
    groups[:, :, :16] = _LEVELS[packed & 15]
    groups[:, :, 16:] = _LEVELS[packed >> 4]
    groups *= (_column(blocks["d"]) * scales.astype(np.float32))[:, :, None]
