"""How a model's hidden states become one embedding: what its checkpoint says about it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

import numpy as np

from steppe.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy.typing as npt

    from steppe.formats.checkpoint import Checkpoint

__all__ = ["Pooling", "add_rows", "read_pooling", "unit_length"]

Pooling = Literal["mean", "last"]

_GGUF_POOLING: dict[int, Pooling] = {0: "last", 1: "mean", 3: "last"}
"""Values of ``{architecture}.pooling_type``: 0 is unspecified, 2 (the first token) and 4 (a
classifier head) belong to encoders.
"""


def read_pooling(checkpoint: Checkpoint) -> Pooling:
    """Mean or last token, as sentence-transformers' ``1_Pooling/config.json`` or the GGUF metadata
    says; the last token where nothing does, since only it has seen the whole text.

    Raises UnsupportedModelError for another rule, CheckpointError for a file that is not one.
    """
    if checkpoint.kind == "gguf":
        name = checkpoint.config.get("general.architecture")
        kind = checkpoint.config.get(f"{name}.pooling_type", 0)
        if kind not in _GGUF_POOLING:
            raise UnsupportedModelError(f"{checkpoint.name}: pooling type {kind} is not supported")
        return _GGUF_POOLING[kind]
    path = checkpoint.path / "1_Pooling" / "config.json"
    if not path.is_file():
        return "last"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    chosen = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    if chosen == ["pooling_mode_mean_tokens"]:
        return "mean"
    if chosen == ["pooling_mode_lasttoken"]:
        return "last"
    raise UnsupportedModelError(f"{path}: pooling {', '.join(chosen) or 'of no kind'}")


def add_rows(
    total: npt.NDArray[np.float64] | None, rows: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """``total`` plus each row in turn, in float64: the same bits however the rows are chunked."""
    if total is None:
        total = np.zeros(rows.shape[1])
    for row in rows:
        total += row
    return total


def unit_length(total: npt.NDArray[np.float64]) -> tuple[float, ...]:
    """The direction of ``total``; zeros stay zeros. A mean and a sum have the same one."""
    norm = float(np.sqrt(np.square(total).sum()))
    return tuple((total / norm if norm else total).tolist())
