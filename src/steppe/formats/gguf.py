"""Our own GGUF reader: memory-mapped, bounds-checked, quick to open.

Reads versions 2 and 3, little-endian, whole or split (``name-00001-of-00003.gguf``). Every count
and length is compared with the bytes that are left before anything is made from it, so a damaged or
hostile file ends as a `CheckpointError` after work in proportion to its size and without allocating
more than that (a few MiB of Python objects aside). Source: the GGUF specification (ggml repository,
``docs/gguf.md``).

Policies where the specification leaves room:

* an array of arrays is refused (nothing writes them, and they could nest without end);
* big-endian files and version 1 are refused by name;
* metadata keys and tensor names occur once; tensors are aligned, inside the file, and do not
  overlap;
* text that is no UTF-8 is surrogate-escaped in values; keys and tensor names must be UTF-8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from steppe.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from steppe.formats.dequant import packed_size
from steppe.formats.ggml_types import GGML_TYPES, TYPE_NAMES
from steppe.formats.mapped import MappedFile, shorten
from steppe.formats.strings import StringArray, decode
from steppe.formats.tensor import StoredTensor

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["SPLIT_NAME", "GGUFFile", "metadata_section", "read_gguf", "split_files"]

_MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
# A longer key or name is damage, not a name (the specification's bound for keys).
_MAX_NAME: Final = 65535
# Real files have tens of keys and up to a few thousand tensors. The objects made for one of them
# are larger than the bytes that describe it, so these bounds keep a dense hostile file cheap: what
# is allocated beyond the file's own size stays under 8 MiB.
_MAX_KEYS: Final = 1 << 12
_MAX_TENSORS: Final = 1 << 14

_SCALARS: Final[dict[int, tuple[Struct, np.dtype[Any]]]] = {
    code: (Struct(f"<{letter}"), np.dtype(name))
    for code, letter, name in (
        (0, "B", "u1"),
        (1, "b", "i1"),
        (2, "H", "<u2"),
        (3, "h", "<i2"),
        (4, "I", "<u4"),
        (5, "i", "<i4"),
        (6, "f", "<f4"),
        (7, "B", "?"),
        (10, "Q", "<u8"),
        (11, "q", "<i8"),
        (12, "d", "<f8"),
    )
}
_BOOL: Final = 7
_U32: Final = Struct("<I")
_U64: Final = Struct("<Q")
_ARRAY_HEAD: Final = Struct("<IQ")
_HEADER: Final = Struct("<4sIQQ")
# The smallest things the header counts: a key of one byte with a one-byte value, and the
# description of a scalar tensor with a one-byte name.
_SMALLEST_ENTRY: Final = 8 + 1 + 4 + 1
_SMALLEST_TENSOR: Final = 8 + 1 + 4 + 4 + 8

SPLIT_NAME: Final = re.compile(r"(?P<stem>.*)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """What a (possibly split) GGUF checkpoint says: metadata by key, tensors by name.

    Numeric arrays are numpy arrays of the stored type, string arrays `StringArray`, other values
    ``bool``, ``int``, ``float`` and ``str``. ``files`` are the maps, in order of the splits.
    """

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: tuple[MappedFile, ...]


class _Cursor:
    """Reads values of one mapped file in sequence and never past its end."""

    __slots__ = ("buffer", "path", "position", "size")

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.buffer = file.buffer
        self.size = file.size
        self.position = 0

    def fail(self, message: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {message}")

    def need(self, nbytes: int, what: str) -> int:
        """Step over ``nbytes`` and return where they begin."""
        start = self.position
        if nbytes > self.size - start:
            self.fail(
                f"{what} takes {nbytes} bytes at offset {start}, but the file has {self.size}: "
                "it is truncated or corrupt"
            )
        self.position = start + nbytes
        return start

    def unpack(self, layout: Struct, what: str) -> Any:
        return layout.unpack_from(self.buffer, self.need(layout.size, what))[0]

    def raw_string(self, what: str) -> memoryview:
        length = self.unpack(_U64, f"the length of {what}")
        start = self.need(length, what)
        return self.buffer[start : start + length]

    def name(self, what: str) -> str:
        """A key or tensor name: short, not empty, valid UTF-8."""
        raw = self.raw_string(what)
        if not 0 < len(raw) <= _MAX_NAME:
            self.fail(f"{what} is {len(raw)} bytes long")
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8: {bytes(raw[:80])!r}")


def split_files(path: Path) -> tuple[Path, ...]:
    """All parts of the split checkpoint that ``path`` is a part of; ``(path,)`` if it is whole.

    Raises `CheckpointError` if the name contradicts itself, `ModelNotFoundError` naming the first
    part that is missing.
    """
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    number, count = int(match["no"]), int(match["count"])
    if not 1 <= number <= count:
        raise CheckpointError(f"{path}: there is no part {number} of {count}")
    parts: list[Path] = []
    for index in range(1, count + 1):
        part = path.with_name(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf")
        if not part.is_file():
            raise ModelNotFoundError(f"{part}: part {index} of {count} is missing")
        parts.append(part)
    return tuple(parts)


def read_gguf(path: Path) -> GGUFFile:
    """Open the GGUF checkpoint at ``path`` (of a split one, any part).

    The maps stay open until the caller closes them. Raises `CheckpointError` for files that are
    truncated, corrupt or inconsistent, `UnsupportedModelError` naming the first tensor of a type we
    do not read, `ModelNotFoundError` for missing files.
    """
    parts = split_files(path)
    files: list[MappedFile] = []
    try:
        metadata: dict[str, Any] = {}
        tensors: dict[str, StoredTensor] = {}
        for index, part in enumerate(parts):
            files.append(MappedFile(part))
            found, part_tensors = _read_part(files[-1])
            _check_split(part, found, index, len(parts))
            if index == 0:
                metadata = found
            for name, tensor in part_tensors.items():
                if name in tensors:
                    raise CheckpointError(f"{part}: tensor {shorten(name)} is in two parts")
                tensors[name] = tensor
        total = metadata.get("split.tensors.count")
        if len(parts) > 1 and total is not None and total != len(tensors):
            raise CheckpointError(
                f"{parts[0]}: the parts hold {len(tensors)} tensors, metadata says {total}"
            )
    except BaseException:
        for file in files:
            file.close()
        raise
    for key, value in metadata.items():
        if isinstance(value, memoryview):
            metadata[key] = decode(value)
    return GGUFFile(metadata, tensors, tuple(files))


def metadata_section(path: Path) -> bytes:
    """A GGUF file of no tensors with the metadata of the one at ``path``, value for value.

    What says how a file was split is left out. Raises as `read_gguf`.
    """
    file = MappedFile(split_files(path)[0])
    try:
        cursor = _Cursor(file)
        _, version, _, key_count = _HEADER.unpack_from(file.buffer, cursor.need(_HEADER.size, ""))
        kept: list[bytes] = []
        for index in range(key_count):
            start = cursor.position
            key = cursor.name(f"metadata key {index}")
            _read_value(cursor, key)
            if not key.startswith("split."):
                kept.append(bytes(file.buffer[start : cursor.position]))
        return _HEADER.pack(_MAGIC, version, 0, len(kept)) + b"".join(kept)
    finally:
        file.close()


def _check_split(path: Path, metadata: dict[str, Any], index: int, count: int) -> None:
    said = metadata.get("split.count", 0)
    if said in (0, 1) and count == 1:
        return
    if said != count:
        raise CheckpointError(
            f"{path}: metadata says this is one of {said} parts, the file name says {count}"
        )
    if metadata.get("split.no") != index:
        raise CheckpointError(
            f"{path}: metadata says this is part {metadata.get('split.no')} (counted from 0), "
            f"the file name says {index}"
        )


def _read_part(file: MappedFile) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    cursor = _Cursor(file)
    start = cursor.need(_HEADER.size, "the header")
    magic, version, tensor_count, key_count = _HEADER.unpack_from(cursor.buffer, start)
    if magic != _MAGIC:
        cursor.fail(f"no GGUF file: it begins with {magic!r}")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModelError(f"{file.path}: big-endian GGUF files are not supported")
        raise UnsupportedModelError(f"{file.path}: GGUF version {version} is not supported")
    left = file.size - cursor.position
    if key_count > min(_MAX_KEYS, left // _SMALLEST_ENTRY):
        cursor.fail(f"{key_count} metadata keys cannot be in a file of {file.size} bytes")
    if tensor_count > min(_MAX_TENSORS, left // _SMALLEST_TENSOR):
        cursor.fail(f"{tensor_count} tensors cannot be in a file of {file.size} bytes")

    metadata: dict[str, Any] = {}
    for index in range(key_count):
        key = cursor.name(f"metadata key {index}")
        if key in metadata:
            cursor.fail(f"metadata key {shorten(key)} occurs twice")
        metadata[key] = _read_value(cursor, key)
    return metadata, _read_tensors(cursor, file.view, tensor_count, _alignment(cursor, metadata))


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        shown = alignment if type(alignment) is int else "not a number"
        cursor.fail(f"general.alignment is no power of two from 8 on: {shown}")
    return alignment


def _read_value(cursor: _Cursor, key: str) -> Any:
    """A value; a string as its bytes, since decoded it may take four times their size.

    They are decoded when all of the file has turned out to be sound.
    """
    kind = cursor.unpack(_U32, f"the type of {shorten(key)}")
    if kind == _STRING:
        return cursor.raw_string(f"the value of {shorten(key)}")
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind not in _SCALARS:
        cursor.fail(f"metadata key {shorten(key)} has unknown value type {kind}")
    value = cursor.unpack(_SCALARS[kind][0], f"the value of {shorten(key)}")
    if kind != _BOOL:
        return value
    if value > 1:
        cursor.fail(f"metadata key {shorten(key)} is a boolean of value {value}")
    return value == 1


def _read_array(cursor: _Cursor, key: str) -> StringArray | NDArray[Any]:
    start = cursor.need(_ARRAY_HEAD.size, f"the array header of {shorten(key)}")
    kind, count = _ARRAY_HEAD.unpack_from(cursor.buffer, start)
    if kind == _ARRAY:
        raise UnsupportedModelError(
            f"{cursor.path}: metadata key {shorten(key)} is an array of arrays"
        )
    if kind == _STRING:
        # An empty string takes its eight bytes of length: checked here, stepped over by parse().
        here = cursor.need(8 * count, f"the array {shorten(key)} of {count} strings")
        try:
            strings, cursor.position = StringArray.parse(cursor.buffer, here, count)
        except CheckpointError as error:
            cursor.fail(f"metadata key {shorten(key)}: {error}")
        return strings
    if kind not in _SCALARS:
        cursor.fail(f"metadata key {shorten(key)} is an array of unknown type {kind}")
    layout = _SCALARS[kind][1]
    size = count * layout.itemsize
    start = cursor.need(size, f"the array {shorten(key)} of {count} values")
    raw = np.frombuffer(cursor.buffer[start : start + size], dtype=np.uint8)
    if kind == _BOOL and raw.size and raw.max() > 1:
        cursor.fail(f"metadata key {shorten(key)} holds a boolean that is neither 0 nor 1")
    # Copied: aligned, and usable after the checkpoint is closed.
    values: NDArray[Any] = raw.copy().view(layout)
    return values


def _read_tensors(
    cursor: _Cursor, view: NDArray[np.uint8], count: int, alignment: int
) -> dict[str, StoredTensor]:
    described: list[tuple[int, int, str, tuple[int, ...], str]] = []
    for index in range(count):
        name = cursor.name(f"the name of tensor {index}")
        shape = _read_shape(cursor, name)
        code = cursor.unpack(_U32, f"the type of tensor {shorten(name)}")
        offset = cursor.unpack(_U64, f"the offset of tensor {shorten(name)}")
        dtype = TYPE_NAMES.get(code, f"number {code}")
        if dtype not in GGML_TYPES:
            raise UnsupportedModelError(
                f"{cursor.path}: tensor {shorten(name)} has type {dtype}, which is not supported"
            )
        if 0 in shape:
            cursor.fail(f"tensor {shorten(name)} of shape {shape} holds nothing")
        if offset % alignment:
            cursor.fail(f"tensor {shorten(name)} at offset {offset} is not aligned to {alignment}")
        try:
            nbytes = packed_size(dtype, shape)
        except CheckpointError as error:
            cursor.fail(f"tensor {shorten(name)}: {error}")
        described.append((offset, nbytes, name, shape, dtype))

    base = -(-cursor.position // alignment) * alignment
    room = cursor.size - base
    tensors: dict[str, StoredTensor] = {}
    for offset, nbytes, name, shape, dtype in described:
        if offset + nbytes > room:
            cursor.fail(
                f"tensor {shorten(name)} ends at byte {base + offset + nbytes}, but the file has "
                f"{cursor.size}: it is truncated or corrupt"
            )
        if name in tensors:
            cursor.fail(f"tensor {shorten(name)} is described twice")
        start = base + offset
        tensors[name] = StoredTensor(name, shape, dtype, view[start : start + nbytes])
    end, last = 0, ""
    for offset, nbytes, name, _, _ in sorted(described):
        if offset < end:
            cursor.fail(f"tensors {shorten(last)} and {shorten(name)} overlap")
        end, last = offset + nbytes, name
    return tensors


def _read_shape(cursor: _Cursor, name: str) -> tuple[int, ...]:
    dimensions = cursor.unpack(_U32, f"the rank of tensor {shorten(name)}")
    if dimensions > _MAX_DIMENSIONS:
        cursor.fail(f"tensor {shorten(name)} has {dimensions} dimensions")
    layout = Struct(f"<{dimensions}Q")
    start = cursor.need(layout.size, f"the shape of tensor {shorten(name)}")
    shape = layout.unpack_from(cursor.buffer, start)
    return tuple(int(size) for size in reversed(shape))
