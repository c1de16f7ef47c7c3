"""Parameters that come to a backend in another form than a checkpoint's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from steppe.backends.base import WeightTensor

__all__ = ["PackedTensor", "QuantizedTensor"]


class QuantizedTensor(ABC):
    """A `WeightTensor` to be stored in ``dtype``, though the checkpoint holds floats.

    Whoever reads ``data`` gets the quantised bytes, made at that moment. A backend that quantises
    by itself, to the same bytes, takes ``source`` instead.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def source(self) -> WeightTensor:
        """The floats."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The type they are to have."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensor:
    """A parameter as the backend that packs matrices left it: a `WeightTensor` of no other use.

    ``layout`` and ``format`` name how ``data`` lies, ``format`` is ``"vector"`` for plain float32.
    ``checksum`` is that of ``data``, by the rule of that backend. ``origin`` is where it comes
    from, for errors. ``drop`` is called by `release`. Immutable: any thread.
    """

    name: str
    shape: tuple[int, ...]
    layout: str
    format: str
    data: npt.NDArray[np.uint8]
    checksum: int
    origin: str
    drop: Callable[[npt.NDArray[np.uint8]], None]
    row_order: None = None
    add: float = 0.0

    @property
    def dtype(self) -> str:
        """No stored type."""
        return f"packed {self.format}"

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Raises BackendError: only the backend that packed it can read it."""
        raise BackendError(
            f"{self.origin} holds weights packed for the native backend, which no other can read: "
            "give the model that it was built from"
        )

    def release(self) -> None:
        """See `WeightTensor`."""
        self.drop(self.data)
