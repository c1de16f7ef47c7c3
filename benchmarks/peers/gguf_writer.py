"""Writes GGUF files (version 3): for benchmarks that need a model nobody publishes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from steppe.formats.ggml_types import GGML_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

ALIGNMENT = 32
U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
DTYPES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11,
          "f8": 12}  # fmt: skip


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Iterable[tuple[str, tuple[int, ...], str, NDArray[np.uint8]]],
) -> None:
    """Write a file. A tensor is its name, its shape (rows first), the name of its ggml type and its
    bytes; metadata are numbers, booleans, texts, lists of texts and numpy arrays.
    """
    tensors = list(tensors)
    head = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    head += [_text(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for name, shape, kind, data in tensors:
        head.append(_text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)))
        head.append(struct.pack("<IQ", GGML_TYPES[kind].code, offset))
        offset += _padded(data.nbytes)
    start = b"".join(head)
    with path.open("wb") as file:
        file.write(start.ljust(_padded(len(start)), b"\0"))
        for _, _, _, data in tensors:
            file.write(data.tobytes())
            file.write(bytes(_padded(data.nbytes) - data.nbytes))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<IB", BOOL, value)
        case int() if 0 <= value < 2**32:
            return struct.pack("<II", U32, value)
        case int() if value < 0:
            return struct.pack("<Ii", I32, value)
        case int():
            return struct.pack("<IQ", U64, value)
        case float():
            return struct.pack("<If", F32, value)
        case str():
            return struct.pack("<I", STRING) + _text(value)
        case np.ndarray():
            kind = BOOL if value.dtype == bool else DTYPES[value.dtype.str[1:]]
            return struct.pack("<IIQ", ARRAY, kind, value.size) + value.tobytes()
        case _:
            texts = [_text(each) for each in value]
            return struct.pack("<IIQ", ARRAY, STRING, len(texts)) + b"".join(texts)
