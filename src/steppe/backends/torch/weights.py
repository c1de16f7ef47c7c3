"""Parameters on their way from a checkpoint to a device, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from steppe.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from steppe.backends.base import WeightTensor

__all__ = ["WeightStore"]

# Types that torch reads as they are stored; everything else is dequantised by the checkpoint.
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightStore:
    """Loads each parameter once, however many operations or names (a tied head) lead to it.

    At any moment only one parameter exists in a second form, so peak memory stays near the final
    size. Not thread-safe: tracing is one thread's work.
    """

    def __init__(
        self, weights: Mapping[str, WeightTensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._weights = weights
        self._device = device
        self._dtype = dtype
        # By identity: a tied parameter is one object under two names, kept so that its id is its.
        self._loaded: dict[tuple[int, torch.dtype], tuple[WeightTensor, torch.Tensor]] = {}

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The parameter in ``dtype`` (the store's own by default), contiguous, on the device.

        Raises ModelError if it is missing or not of ``shape``.
        """
        stored = self._weights.get(name)
        if stored is None:
            raise ModelError(f"the model has no parameter {name}")
        key = (id(stored), dtype or self._dtype)
        if key not in self._loaded:
            self._loaded[key] = (stored, _read(stored).to(self._device, key[1]).contiguous())
            stored.release()
        _, tensor = self._loaded[key]
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"parameter {name} has shape {tuple(tensor.shape)}, the program wants {shape}"
            )
        return tensor


def _read(stored: WeightTensor) -> torch.Tensor:
    plain = _PLAIN.get(stored.dtype)
    if plain is None or stored.add != 0.0:
        return torch.from_numpy(stored.dequantize()).clone()
    # Copies, here and above: torch aligns its memory, and alignment can decide a product's last
    # bits; besides, a mapped file is at the mercy of whoever truncates it.
    tensor = torch.empty(stored.shape, dtype=plain)
    raw = tensor.view(-1).view(torch.uint8).numpy()
    if raw.size != stored.data.size:
        raise ModelError(
            f"parameter {stored.name} holds {stored.data.size} bytes, its shape needs {raw.size}"
        )
    np.copyto(raw, stored.data.reshape(-1))
    if stored.row_order is None:
        return tensor
    return tensor[torch.from_numpy(np.array(stored.row_order, np.int64))]
