"""The string arrays of GGUF metadata, decoded when somebody looks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from struct import Struct
from typing import overload

from steppe.errors import CheckpointError

__all__ = ["StringArray", "decode"]

_LENGTH = Struct("<Q")


def decode(raw: bytes | memoryview) -> str:
    """UTF-8, where bytes that are none become lone surrogates.

    Token texts may be arbitrary bytes. ``text.encode("utf-8", "surrogateescape")`` restores them.
    """
    return str(raw, "utf-8", "surrogateescape")


class StringArray(Sequence[str]):
    """The strings of one metadata array, over the file's bytes.

    Opening only walks the length prefixes: a vocabulary that nobody reads (its tokenizer is cached)
    costs no string. The first iteration decodes all and remembers them. Bytes that are not UTF-8
    are surrogate-escaped (see `decode`). Equal to any sequence of equal strings; unhashable.
    Any thread may read.
    """

    __slots__ = ("_ends", "_strings", "_view")

    def __init__(self, view: memoryview, ends: array[int]) -> None:
        # ends[i] is where string i - 1 ends; string i lies after its 8-byte length.
        self._view = view
        self._ends = ends
        self._strings: list[str] | None = None

    @classmethod
    def parse(cls, view: memoryview, start: int, count: int) -> tuple[StringArray, int]:
        """Walk ``count`` strings from ``start``; returns them and where they end.

        The caller has checked that ``count`` empty strings would fit in ``view``. Raises
        `CheckpointError` if the strings run past its end.
        """
        ends = array("q", [start]) * (count + 1)
        size = len(view)
        position = start
        unpack = _LENGTH.unpack_from
        for index in range(1, count + 1):
            if position + 8 > size:
                raise CheckpointError(f"the file ends inside string {index - 1} of {count}")
            position += 8 + unpack(view, position)[0]
            if position > size:
                raise CheckpointError(f"string {index - 1} of {count} runs past the file's end")
            ends[index] = position
        return cls(view, ends), position

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self._all()[index]
        if self._strings is not None:
            return self._strings[index]
        place = range(len(self))[index]
        return decode(self._view[self._ends[place] + 8 : self._ends[place + 1]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __contains__(self, value: object) -> bool:
        return value in self._all()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, str | bytes):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)} strings>"

    def _all(self) -> list[str]:
        strings = self._strings
        if strings is None:
            view = self._view
            strings = [
                str(view[before + 8 : end], "utf-8", "surrogateescape")
                for before, end in pairwise(self._ends)
            ]
            self._strings = strings
        return strings
