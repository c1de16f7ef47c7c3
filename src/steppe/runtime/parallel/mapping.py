"""Where one rank stands among the ranks of a deployment (seed 002, ``ParallelMapping``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steppe.errors import BackendError

__all__ = ["ParallelMapping", "TokenBroadcastFn"]

TokenBroadcastFn = Callable[[npt.NDArray[np.int32]], bool]
"""Broadcasts an int32 buffer in place: rank 0 sends, the others receive. False means a lost peer.
"""


@dataclass(frozen=True, slots=True)
class ParallelMapping:
    """Coordinates of one rank. Sizes below 1 count as 1; groups of one are inactive.

    Raises BackendError for coordinates outside the world, or sizes that do not multiply to it.
    """

    world_size: int = 1
    rank: int = 0
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    local_device: int = 0

    def __post_init__(self) -> None:
        for name in ("world_size", "tensor_parallel_size"):
            object.__setattr__(self, name, max(1, getattr(self, name)))
        if not 0 <= self.rank < self.world_size:
            raise BackendError(f"rank {self.rank} is outside a world of {self.world_size}")
        if not 0 <= self.tensor_parallel_rank < self.tensor_parallel_size:
            raise BackendError(
                f"tensor parallel rank {self.tensor_parallel_rank} is outside a group of "
                f"{self.tensor_parallel_size}"
            )
        if self.world_size % self.tensor_parallel_size:
            raise BackendError(
                f"a world of {self.world_size} does not divide into tensor parallel groups of "
                f"{self.tensor_parallel_size}"
            )

    @property
    def parallel(self) -> bool:
        """Whether there is more than one rank."""
        return self.world_size > 1
