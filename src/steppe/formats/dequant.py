"""Dequantisation in numpy: the bytes of a tensor become float32.

Bit-equal to the formats' reference; the oracle in the tests is the ``gguf`` package. This is the
reference path and the loader of small tensors: the native backend keeps blocks as they are stored.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from steppe.errors import CheckpointError, UnsupportedModelError
from steppe.formats import kquants
from steppe.formats.ggml_types import GGML_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["dequantize", "packed_size"]

Blocks = NDArray[Any]
Floats = NDArray[np.float32]

# Values decoded at a time: temporaries stay near a megabyte, whatever the tensor's size.
_CHUNK_VALUES: Final = 1 << 18

_Q4_0: Final = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
_Q4_1: Final = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
_Q5_0: Final = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
_Q5_1: Final = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
_Q8_0: Final = np.dtype([("d", "<f2"), ("qs", "i1", 32)])


def _column(scale: NDArray[np.float16]) -> Floats:
    return scale.astype(np.float32)[:, None]


def _nibbles(blocks: Blocks, out: Floats) -> None:
    packed = blocks["qs"]
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _five_bits(blocks: Blocks, out: Floats) -> None:
    packed = blocks["qs"]
    high = np.unpackbits(np.ascontiguousarray(blocks["qh"]), axis=1, bitorder="little") << 4
    out[:, :16] = packed & 15 | high[:, :16]
    out[:, 16:] = packed >> 4 | high[:, 16:]


def _decode_f32(blocks: Blocks, out: Floats) -> None:
    out[:, 0] = blocks


def _decode_bf16(blocks: Blocks, out: Floats) -> None:
    np.left_shift(blocks.astype(np.uint32), 16, out=out[:, 0].view(np.uint32))


def _decode_q4_0(blocks: Blocks, out: Floats) -> None:
    _nibbles(blocks, out)
    out -= np.float32(8)
    out *= _column(blocks["d"])


def _decode_q4_1(blocks: Blocks, out: Floats) -> None:
    _nibbles(blocks, out)
    out *= _column(blocks["d"])
    out += _column(blocks["m"])


def _decode_q5_0(blocks: Blocks, out: Floats) -> None:
    _five_bits(blocks, out)
    out -= np.float32(16)
    out *= _column(blocks["d"])


def _decode_q5_1(blocks: Blocks, out: Floats) -> None:
    _five_bits(blocks, out)
    out *= _column(blocks["d"])
    out += _column(blocks["m"])


def _decode_q8_0(blocks: Blocks, out: Floats) -> None:
    out[...] = blocks["qs"]
    out *= _column(blocks["d"])


_DECODERS: Final[dict[str, tuple[np.dtype[Any], Callable[[Blocks, Floats], None]]]] = {
    "F32": (np.dtype("<f4"), _decode_f32),
    "F16": (np.dtype("<f2"), _decode_f32),
    "BF16": (np.dtype("<u2"), _decode_bf16),
    "Q4_0": (_Q4_0, _decode_q4_0),
    "Q4_1": (_Q4_1, _decode_q4_1),
    "Q5_0": (_Q5_0, _decode_q5_0),
    "Q5_1": (_Q5_1, _decode_q5_1),
    "Q8_0": (_Q8_0, _decode_q8_0),
    "Q2_K": (kquants.Q2_K, kquants.decode_q2_k),
    "Q3_K": (kquants.Q3_K, kquants.decode_q3_k),
    "Q4_K": (kquants.Q4_K, kquants.decode_q4_k),
    "Q5_K": (kquants.Q5_K, kquants.decode_q5_k),
    "Q6_K": (kquants.Q6_K, kquants.decode_q6_k),
    "IQ4_NL": (kquants.IQ4_NL, kquants.decode_iq4_nl),
    "IQ4_XS": (kquants.IQ4_XS, kquants.decode_iq4_xs),
}


def packed_size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor of this type and (row-major) shape takes in a file.

    Raises `UnsupportedModelError` for a type we do not read and `CheckpointError` if a row is no
    whole number of blocks.
    """
    kind = GGML_TYPES.get(dtype)
    if kind is None:
        raise UnsupportedModelError(f"tensor type {dtype} is not supported")
    if kind.elements > 1 and (not shape or shape[-1] % kind.elements):
        row = shape[-1] if shape else 1
        raise CheckpointError(
            f"a row of {row} values is no whole number of {dtype} blocks ({kind.elements} values)"
        )
    return math.prod(shape) // kind.elements * kind.nbytes


def dequantize(dtype: str, data: NDArray[np.uint8], shape: tuple[int, ...]) -> Floats:
    """Decode ``data`` (uint8, 1-D) into a fresh, writable, C-contiguous float32 array of ``shape``.

    Works in chunks, so temporaries stay small. Pure: any thread. Raises as `packed_size` does, and
    `CheckpointError` if ``data`` has another size than type and shape demand.
    """
    expected = packed_size(dtype, shape)
    if data.dtype != np.uint8 or data.ndim != 1 or data.size != expected:
        raise CheckpointError(
            f"{data.size} bytes given where {dtype} of shape {shape} takes {expected}"
        )
    layout, decode = _DECODERS[dtype]
    elements = GGML_TYPES[dtype].elements
    blocks = np.ascontiguousarray(data).view(layout)
    out = np.empty((blocks.size, elements), dtype=np.float32)
    step = max(1, _CHUNK_VALUES // elements)
    # Scales in a damaged or random file may be infinite: the result then is, quietly, not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, blocks.size, step):
            decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)
