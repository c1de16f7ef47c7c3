"""Quantising a float checkpoint when it is loaded: which parameters, and to what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from steppe.backends.stored import QuantizedTensor
from steppe.errors import CheckpointError, ConfigError, UnsupportedModelError
from steppe.formats.dequant import dequantize
from steppe.formats.quantize import quantize

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from steppe.backends.base import WeightTensor
    from steppe.models.registry import Model

__all__ = ["QUANTIZE", "QuantizedWeight", "quantized"]

QUANTIZE: Final = ("q8", "q4")
"""What ``quantize`` may be."""

_FLOATS: Final = ("F32", "F16", "BF16")
_GROUP: Final = 32
# Every token reads these, and an error here has no later layer to soften it.
_OUTER: Final = ("model.embed_tokens.weight", "lm_head.weight")
# A few rows that decide which experts run: rounding them saves nothing and changes choices.
_ROUTER: Final = ".mlp.gate.weight"


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight(QuantizedTensor):
    """A parameter that is stored as floats and wanted in ``dtype``. Immutable: any thread."""

    source: WeightTensor
    dtype: str
    row_order: None = None
    add: float = 0.0

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and width."""
        return self.source.shape

    @property
    def data(self) -> NDArray[np.uint8]:
        """The quantised bytes, made anew. Raises CheckpointError for values that are no numbers."""
        try:
            return quantize(self.dtype, self.source.dequantize())
        except CheckpointError as error:
            raise CheckpointError(f"{self.name}: {error}") from error

    def dequantize(self) -> NDArray[np.float32]:
        """What the quantised parameter stands for."""
        return dequantize(self.dtype, self.data, self.shape)

    def release(self) -> None:
        """See `steppe.backends.base.WeightTensor`."""
        self.source.release()


def quantized(model: Model, how: str) -> Model:
    """``model`` with its matrices in groups of 32: ``q8`` as Q8_0, ``q4`` as Q4_1.

    With ``q4`` the embedding and the head are Q8_0. A mixture's router and matrices whose rows are
    no whole groups stay as they are stored, as do all vectors. Nothing is read here.

    Raises ConfigError for another ``how``, UnsupportedModelError for a checkpoint that is quantised
    already.
    """
    if how not in QUANTIZE:
        raise ConfigError("quantize", f"there is no {how!r}: choose {' or '.join(QUANTIZE)}")
    made: dict[int, WeightTensor] = {}
    weights: dict[str, WeightTensor] = {}
    # A tied head is the embedding: one object under two names stays one.
    for name, weight in model.weights.items():
        if id(weight) not in made:
            made[id(weight)] = _quantized(name, weight, how)
        weights[name] = made[id(weight)]
    return replace(model, weights=weights)


def _quantized(name: str, weight: WeightTensor, how: str) -> WeightTensor:
    if len(weight.shape) != 2:
        return weight
    if weight.dtype not in _FLOATS:
        raise UnsupportedModelError(
            f"{name} is stored as {weight.dtype}: only float checkpoints are quantised"
        )
    if weight.shape[1] % _GROUP or name.endswith(_ROUTER):
        return weight
    return QuantizedWeight(weight, "Q8_0" if how == "q8" or name in _OUTER else "Q4_1")
