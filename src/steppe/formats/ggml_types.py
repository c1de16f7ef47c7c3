"""The tensor types of ggml: their numbers in a file, and how many bytes a block takes.

Source: the GGUF specification (ggml repository, ``docs/gguf.md``) and the block structures that it
refers to. A quantised row is a sequence of blocks; a block holds ``elements`` values in ``nbytes``
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["GGML_TYPES", "TYPE_NAMES", "GgmlType"]


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One type we read: its number in the file, values per block and bytes per block."""

    name: str
    code: int
    elements: int
    nbytes: int


GGML_TYPES: Final[dict[str, GgmlType]] = {
    kind.name: kind
    for kind in (
        GgmlType("F32", 0, 1, 4),
        GgmlType("F16", 1, 1, 2),
        GgmlType("Q4_0", 2, 32, 18),
        GgmlType("Q4_1", 3, 32, 20),
        GgmlType("Q5_0", 6, 32, 22),
        GgmlType("Q5_1", 7, 32, 24),
        GgmlType("Q8_0", 8, 32, 34),
        GgmlType("Q2_K", 10, 256, 84),
        GgmlType("Q3_K", 11, 256, 110),
        GgmlType("Q4_K", 12, 256, 144),
        GgmlType("Q5_K", 13, 256, 176),
        GgmlType("Q6_K", 14, 256, 210),
        GgmlType("IQ4_NL", 20, 32, 18),
        GgmlType("IQ4_XS", 23, 256, 136),
        GgmlType("BF16", 30, 1, 2),
    )
}
"""The types we read, by name."""

TYPE_NAMES: Final[dict[int, str]] = {kind.code: kind.name for kind in GGML_TYPES.values()} | {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of all the numbers known to us: a refusal says which type it refuses."""
