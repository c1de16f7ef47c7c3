"""Random tensors in every stored type."""

from __future__ import annotations

import numpy as np

from steppe.formats.ggml_types import GGML_TYPES

# Where the half-precision scales and minimums of a block stand.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
}


def random_blocks(
    rng: np.random.Generator, dtype: str, rows: int, width: int, *, zeros: float = 0.1
) -> np.ndarray:
    """Bytes of a [rows, width] tensor: any quants, finite scales, a share of them zero."""
    kind = GGML_TYPES[dtype]
    count = rows * width // kind.elements
    if dtype not in SCALES:
        values = rng.standard_normal(count).astype(np.float32)
        if dtype == "F16":
            return values.astype(np.float16).view(np.uint8)
        if dtype == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.view(np.uint8)
    raw = rng.integers(0, 256, (count, kind.nbytes), dtype=np.uint8)
    for at in SCALES[dtype]:
        scale = rng.standard_normal(count) * 10.0 ** rng.integers(-7, 1, count)
        scale[rng.random(count) < zeros] = 0.0
        raw[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(count, 2)
    return raw.reshape(-1)


def bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, half to even, as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
