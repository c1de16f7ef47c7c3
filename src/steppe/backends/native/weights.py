"""Parameters on their way from a checkpoint into packed memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from steppe.backends.native import _native
from steppe.backends.stored import PackedTensor, QuantizedTensor
from steppe.errors import EngineDirectoryError, ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from steppe.backends.base import WeightTensor

__all__ = ["Packed", "WeightStore", "pack"]

_PACKED = frozenset(
    {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS"}
    | {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
)


class Packed(NamedTuple):
    """A parameter as an engine directory keeps it."""

    format: str
    data: npt.NDArray[np.uint8]
    checksum: int


def pack(stored: WeightTensor) -> Packed:
    """Pack a matrix, or make float32 of a vector: the bytes that a `WeightStore` would compute on.

    Raises ModelError.
    """
    if len(stored.shape) == 2:
        source = _stored(stored)
        rows, width = stored.shape
        try:
            packed = _native.packed(
                source.dtype, source.data, rows, width, source.order, source.quantize
            )
        except ValueError as error:
            raise ModelError(f"parameter {stored.name}: {error}") from error
        kind = _native.format_of(source.quantize or source.dtype)
    else:
        kind, packed = "vector", _floats(stored).view(np.uint8)
    stored.release()
    return Packed(kind, packed, _native.checksum(packed))


class WeightStore:
    """Packs each parameter once, however many operations or names (a tied head) lead to it.

    Matrices keep their stored type, unless they are to be quantised; float16 becomes bfloat16.
    Those of an engine directory are copied, since only memory that is no file's gets huge pages.
    One thread.
    """

    def __init__(self, weights: Mapping[str, WeightTensor], program: _native.Program) -> None:
        self._weights = weights
        self._program = program
        # By identity: a tied parameter is one object under two names, kept so that its id is its.
        self._matrices: dict[int, tuple[WeightTensor, int]] = {}
        self._vectors: dict[tuple[int, int], tuple[WeightTensor, int]] = {}

    def matrix(self, name: str, rows: int, width: int) -> int:
        """The number of the packed matrix [rows, width]. Raises ModelError."""
        stored = self._get(name, (rows, width))
        if id(stored) not in self._matrices:
            if isinstance(stored, PackedTensor):
                number = self._copy(stored, rows, width)
            else:
                source = _stored(stored)
                try:
                    number = self._program.add_weight(
                        source.dtype, source.data, rows, width, source.order, source.quantize
                    )
                except ValueError as error:
                    raise ModelError(f"parameter {name}: {error}") from error
            stored.release()
            self._matrices[id(stored)] = (stored, number)
        return self._matrices[id(stored)][1]

    def vector(self, name: str, length: int) -> int:
        """The number of the float32 vector. Raises ModelError."""
        stored = self._get(name, (length,))
        key = (id(stored), length)
        if key not in self._vectors:
            values = _checked(stored) if isinstance(stored, PackedTensor) else _floats(stored)
            self._vectors[key] = (stored, self._program.add_vector(values))
            stored.release()
        return self._vectors[key][1]

    def _copy(self, stored: PackedTensor, rows: int, width: int) -> int:
        if stored.layout != _native.LAYOUT:
            raise _rebuild(
                stored, f"packed as {stored.layout[:80]!r}, this build reads {_native.LAYOUT!r}"
            )
        try:
            return self._program.add_packed(
                stored.format, stored.data, rows, width, stored.checksum
            )
        except ValueError as error:
            raise _rebuild(stored, f"{error}") from error

    def _get(self, name: str, shape: tuple[int, ...]) -> WeightTensor:
        stored = self._weights.get(name)
        if stored is None:
            raise ModelError(f"the model has no parameter {name}")
        if tuple(stored.shape) != shape:
            raise ModelError(
                f"parameter {name} has shape {tuple(stored.shape)}, the program wants {shape}"
            )
        return stored


class _Source(NamedTuple):
    """What the extension packs a matrix from: stored bytes in ``dtype``, the rows to take in order,
    and the type to quantise them to, "" for none.
    """

    dtype: str
    data: npt.NDArray[np.uint8]
    order: npt.NDArray[np.int64] | None
    quantize: str


def _stored(stored: WeightTensor) -> _Source:
    quantize = ""
    if isinstance(stored, QuantizedTensor):
        quantize, stored = stored.dtype, stored.source
    if stored.dtype not in _PACKED or stored.add != 0.0:
        data = np.ascontiguousarray(stored.dequantize()).view(np.uint8).reshape(-1)
        return _Source("F32", data, None, quantize)
    order = stored.row_order
    if order is not None:
        order = np.ascontiguousarray(order, np.int64)
    data = np.ascontiguousarray(stored.data).reshape(-1)
    return _Source(stored.dtype, data, order, quantize)


def _floats(stored: WeightTensor) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(stored.dequantize(), np.float32).reshape(-1)


def _checked(stored: PackedTensor) -> npt.NDArray[np.float32]:
    """The vector of an engine directory."""
    if stored.format != "vector" or stored.data.size != 4 * stored.shape[0]:
        raise _rebuild(stored, "not a vector of that length")
    if _native.checksum(stored.data) != stored.checksum:
        raise _rebuild(stored, "the checksum is wrong")
    return stored.data.view(np.float32)


def _rebuild(stored: PackedTensor, what: str) -> EngineDirectoryError:
    return EngineDirectoryError(
        f"{stored.origin}: {stored.name[:100]}: {what}; rebuild it with steppe build"
    )
