"""A tensor as a checkpoint stores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.formats.dequant import dequantize

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["StoredTensor"]


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One named tensor in a memory-mapped file.

    ``shape`` is row-major, outermost first (GGUF's dimensions reversed). ``dtype`` is the ggml
    type's name (``"Q4_K"``, ``"BF16"``, ...); safetensors types use the same names. ``data`` is a
    read-only uint8 view of the map, 1-D, not copied: it keeps the file mapped while it lives. A
    file that another process truncates while it is mapped ends this one with SIGBUS, as with any
    memory map. Immutable: any thread.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return int(self.data.size)

    def dequantize(self) -> NDArray[np.float32]:
        """The values as a fresh, writable, C-contiguous float32 array of ``shape``."""
        return dequantize(self.dtype, self.data, self.shape)
