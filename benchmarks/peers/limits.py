"""What bounds an engine here, measured beside it: read bandwidth, integer arithmetic, barriers.

``limits(threads)`` runs in the pool of the native backend: the time of an empty phase (a barrier),
what a read of 256 MB reaches, and the rate of 8-bit multiplications in a large product, which is
the best of our own kernels and, where torch is there, of its 8-bit product.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.backends.native import _native

if TYPE_CHECKING:
    from types import ModuleType

READ = 256 << 20
ROWS = 1024
SHAPES = ((1024, 1024), (4096, 4096))


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of a barrier, bytes read a second, 8-bit operations a second (two per product)."""

    isa: str
    barrier: float
    read: float
    int8: float

    def __str__(self) -> str:
        return (
            f"{self.isa}: barrier {self.barrier * 1e9:.0f} ns, read {self.read / 1e9:.1f} GB/s,"
            f" int8 {self.int8 / 1e9:.0f} GOPS"
        )


def limits(threads: int) -> Limits:
    """Measure, in about two seconds."""
    isa = _native.variants()[0]
    probes = [_native.probe(isa, threads, READ) for _ in range(3)]
    ours = max(
        2 * ROWS * n * k / _native.time_linear(isa, "Q8_0", ROWS, n, k, threads, 3)[0]
        for n, k in SHAPES
    )
    return Limits(
        isa,
        min(barrier for barrier, _ in probes),
        max(read for _, read in probes),
        max(ours, _torch_int8(threads, ours)),
    )


def _torch_int8(threads: int, ours: float) -> float:
    """The rate of torch's 8-bit product, 0 without torch.

    Without VNNI torch multiplies in a plain loop, for minutes at the large shapes: those are left
    out where a small one has nowhere near ``ours``.
    """
    try:
        import torch
    except ImportError:
        return 0.0
    torch.set_num_threads(threads)
    best = _torch_product(torch, 128, 512, 512)
    if best < ours / 10:
        return best
    return max(best, *(_torch_product(torch, ROWS, n, k) for n, k in SHAPES))


def _torch_product(torch: ModuleType, rows: int, n: int, k: int) -> float:
    """The best rate of three products."""
    left = torch.randint(-127, 127, (rows, k), dtype=torch.int8)
    right = torch.randint(-127, 127, (k, n), dtype=torch.int8)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        torch._int_mm(left, right)
        best = max(best, 2 * rows * n * k / (time.perf_counter() - start))
    return best
