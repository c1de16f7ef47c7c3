"""Small checkpoints for the tests: written by the formats' own packages, or byte by byte."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SUPPORTED = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)

# Where the 16-bit scales lie in a block. Random bytes there would be infinities and NaNs.
_SCALE_OFFSETS = {
    "F16": (0,),
    "BF16": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def random_blocks(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random bytes of a tensor: uint8 of ``(rows, bytes per row)``, every scale finite."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    assert shape[-1] % elements == 0
    blocks = int(np.prod(shape)) // elements
    if dtype == "F32":
        values = rng.standard_normal(blocks).astype(np.float32)
        return values.view(np.uint8).reshape(-1, shape[-1] * 4)
    raw = rng.integers(0, 256, (blocks, nbytes), dtype=np.uint8)
    for offset in _SCALE_OFFSETS[dtype]:
        scale = rng.standard_normal(blocks)
        if dtype == "BF16":
            bits = (scale.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            bits = scale.astype(np.float16).view(np.uint16)
        raw[:, offset : offset + 2] = bits.view(np.uint8).reshape(-1, 2)
    return raw.reshape(-1, shape[-1] // elements * nbytes)


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...], np.ndarray]],
    metadata: Mapping[str, Any] | None = None,
    *,
    alignment: int | None = None,
    split_max_tensors: int = 0,
) -> None:
    """Write a GGUF file with the ``gguf`` package.

    ``tensors``: name -> (type, row-major shape, raw bytes); ``metadata``: key -> (name of the
    writer's ``add_`` method, value).
    """
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split_max_tensors)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, (method, value) in (metadata or {}).items():
        getattr(writer, f"add_{method}")(key, value)
    for name, (dtype, shape, raw) in tensors.items():
        kind = gguf.GGMLQuantizationType[dtype]
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows = raw.reshape(*shape[:-1], -1)
        assert rows.shape[-1] % block_bytes == 0
        if dtype in ("F32", "F16"):
            rows = rows.view(np.float32 if dtype == "F32" else np.float16)
        writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def text(value: bytes | str) -> bytes:
    """A GGUF string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: bytes | str, kind: int, value: bytes) -> bytes:
    """A GGUF metadata pair; ``value`` already packed."""
    return text(key) + struct.pack("<I", kind) + value


def tensor_info(
    name: bytes | str, shape: Sequence[int] = (8,), kind: int = 0, offset: int = 0
) -> bytes:
    """The description of a tensor; ``shape`` in GGUF's order, innermost first."""
    return (
        text(name)
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", kind, offset)
    )


def raw_gguf(
    pairs: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    pair_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file, byte by byte, whose header may lie."""
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(infos) if tensor_count is None else tensor_count,
        len(pairs) if pair_count is None else pair_count,
    )
    body = head + b"".join(pairs) + b"".join(infos)
    return body + bytes(-len(body) % alignment) + data
