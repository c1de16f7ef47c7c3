"""How fast the native attention is here: ``python benchmarks/native_attention.py``.

Prints the machine's state, then for each case the milliseconds of one layer (median over steps of
``--layers`` layers, each with a cache of its own, as a model has), the arithmetic that the causal
mask asks for in GFLOPS, and the keys and values that it reads in GB/s. Queries, keys and values are
zeros, which costs what other numbers cost.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import numpy as np

from steppe.backends.native import _native

PAGE = 64
ANGLES, ROPE = 7, 8


class Case(NamedTuple):
    """``sequences`` of ``context`` cached tokens, of which ``queries`` are this step's."""

    name: str
    sequences: int
    queries: int
    context: int
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    window: int = 0


CASES = (
    Case("prefill 1024", 1, 1024, 1024),
    Case("prefill 2048", 1, 2048, 2048),
    Case("last 512 of 2048", 1, 512, 2048),
    *(Case(f"decode {m} at {n}", m, 1, n) for n in (256, 2048) for m in (1, 8, 32)),
    Case("gemma prefill 1024", 1, 1024, 1024, 4, 1, 256, 512),
    *(Case(f"gemma decode {m} at 2048", m, 1, 2048, 4, 1, 256, 512) for m in (1, 8)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa", default="")
    parser.add_argument("--kv-dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--cases", default="", help="only those whose name holds this")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.5)
    args = parser.parse_args()
    threads = args.threads or _native.default_threads()
    barrier, read = _native.probe(args.isa, threads, 256 << 20)
    print(f"{threads} threads: empty phase {barrier * 1e9:.0f} ns, read {read / 1e9:.1f} GB/s")
    print(f"{'case':24}{'kv':>10}{'ms':>9}{'GFLOPS':>9}{'GB/s':>8}")
    for case in CASES:
        if args.cases not in case.name:
            continue
        for kv in args.kv_dtype:
            step = Step(args.isa, threads, case, args.layers, kv)
            times: list[float] = []
            end = time.perf_counter() + args.seconds
            while time.perf_counter() < end or len(times) < 4:
                times.append(step.seconds() / args.layers)
            took = statistics.median(times[1:])
            print(
                f"{case.name:24}{kv:>10}{took * 1e3:9.3f}"
                f"{step.flops / took / 1e9:9.0f}{step.bytes / took / 1e9:8.1f}"
            )


class Step:
    """A program of nothing but attention, and a step for it."""

    def __init__(self, isa: str, threads: int, case: Case, layers: int, kv: str) -> None:
        self._program = program = _native.Program(isa, threads, 8, 1 << 20)
        program.set_groups(1)
        program.set_kv_dtype(kv)
        width = case.heads * case.dim
        out = program.add_slot(width, 0)
        q = program.add_slot(width, 0)
        rope = program.add_rope(np.zeros(case.dim // 2, np.float32), 1.0)
        x = program.add_slot(width, 0)
        k, v = (program.add_slot(case.kv_heads * case.dim, 0) for _ in range(2))
        angles = (ANGLES, rope, -1, -1, -1, -1, -1, 0.0)
        for layer in range(layers):
            program.add_layer(0, case.kv_heads, case.dim, case.window)
            program.rows_phase(0, [angles, (ROPE, x, k, v, layer, rope, q, 0.0)])
            program.attention_phase(q, layer, case.heads, 0.125, 0.0, out, -1)
        pages = -(-case.context // PAGE)
        program.allocate_cache([case.sequences * pages])
        first = case.context - case.queries
        table = np.arange(case.sequences * pages, dtype=np.int32).reshape(case.sequences, pages)
        positions = np.tile(np.arange(first, case.context, dtype=np.int32), case.sequences)
        # What was never written is one page of zeros to the system, and reads too fast.
        for page in range(case.sequences * pages):
            slots = np.arange(page * PAGE, (page + 1) * PAGE)
            program.run(*arguments(slots % PAGE, np.array([PAGE]), PAGE, table[:1, :1], slots))
        starts = np.full(case.sequences, case.queries)
        at = table[:, positions[: case.queries] // PAGE] * PAGE + positions[: case.queries] % PAGE
        self._arguments = arguments(positions, starts, case.context, table, at.reshape(-1))
        seen = positions.astype(np.int64) + 1
        oldest = 0
        if case.window:
            seen = np.minimum(seen, case.window)
            oldest = max(0, first - case.window + 1)
        self.flops = 4 * case.dim * case.heads * int(seen.sum())
        read = -(-(case.context - oldest) // PAGE) / pages
        self.bytes = int(program.layer_page_bytes(0) * case.sequences * pages * read)

    def seconds(self) -> float:
        """Time of one step."""
        start = time.perf_counter()
        self._program.run(*self._arguments)
        return time.perf_counter() - start


def arguments(
    positions: Any, lengths: Any, context: int, table: Any, slots: Any
) -> tuple[Any, ...]:
    """Of a step that wants no logits; every sequence has the same context."""
    none = np.zeros(0, np.int32)
    return (
        np.zeros(positions.size, np.int32),
        positions.astype(np.int32),
        np.cumsum([0, *lengths]).astype(np.int32),
        np.full(lengths.size, context, np.int32),
        [np.ascontiguousarray(table)],
        [slots.astype(np.int64)],
        none,
        np.zeros((0, 64), np.uint8),
        None,
        [],
        None,
        none,
        *[None] * 4,
        [],
    )


if __name__ == "__main__":
    main()
