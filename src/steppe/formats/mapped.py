"""A read-only memory map of one checkpoint file."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from steppe.errors import CheckpointError, ModelNotFoundError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["MappedFile", "release_pages", "shorten"]


def shorten(text: str, limit: int = 80) -> str:
    """``text`` made safe for a message: escaped, and cut when a hostile file made it long."""
    shown = ascii(text[: limit + 1])
    return shown if len(text) <= limit else f"{shown[:limit]}...'"


class MappedFile:
    """``path`` mapped read-only; ``view`` is the whole file as uint8, ``buffer`` the same memory.

    Raises `ModelNotFoundError` if there is no such file and `CheckpointError` if it cannot be
    mapped (unreadable, empty, no regular file).
    """

    __slots__ = ("_map", "buffer", "path", "size", "view")

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            # Opening a named pipe would wait for its writer.
            raise CheckpointError(f"{path}: not a regular file")
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ModelNotFoundError(f"{path}: no such file") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be mapped: {error}") from error
        self.size = len(self._map)
        self.buffer = memoryview(self._map)
        self.view: NDArray[np.uint8] = np.frombuffer(self.buffer, dtype=np.uint8)

    def find(self, what: bytes, start: int, end: int) -> int:
        """Where ``what`` first is between the two offsets, without copying; -1 if nowhere."""
        return self._map.find(what, start, end)

    def close(self) -> None:
        """Let go of the map. It is unmapped when the last view of it is gone, at once if none is.

        A second call does nothing.
        """
        self.view = np.empty(0, dtype=np.uint8)
        self.buffer = memoryview(b"")
        try:
            self._map.close()
        except BufferError:
            # Somebody still holds a tensor: unmapping under them would crash the process.
            return


def release_pages(view: NDArray[np.uint8]) -> None:
    """Give the pages under ``view``, if it lies in a mapped file, back to the file cache.

    For whoever has copied what is there: until they are looked at again, they no longer count as
    this process's memory. The view stays valid.
    """
    owner: object = view
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(owner, memoryview) or not isinstance(owner.obj, mmap.mmap) or not view.size:
        return
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    base = np.frombuffer(owner, dtype=np.uint8).ctypes.data
    start = (view.ctypes.data - base) // mmap.PAGESIZE * mmap.PAGESIZE
    owner.obj.madvise(mmap.MADV_DONTNEED, start, view.ctypes.data + view.nbytes - base - start)
