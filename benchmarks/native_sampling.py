"""What a draw costs in the native sampler: ``python benchmarks/native_sampling.py``.

Microseconds a row on one thread, by what the request asks for, for each ``--isa``, and beside them
what numpy takes for the same tokens (the statement of the rules in ``sampling_rules``). Rows are
normal logits as flat as ``--spread`` says. Medians of ``--repeats`` passes over ``--rows`` rows;
it fails if a token differs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from steppe.backends import sampling_rules as rules
from steppe.backends.base import SAMPLE_ROW, SampleBatch
from steppe.backends.native import _native

if TYPE_CHECKING:
    from collections.abc import Callable

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 40": {"temperature": 0.8, "top_k": 40},
    "top_k 40, top_p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
}


def median_of(repeats: int, run: Callable[[], Any]) -> tuple[float, Any]:
    """Median seconds of a call, and what it last returned."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - began)
    return statistics.median(times), result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", nargs="+", default=_native.variants(), choices=_native.variants())
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--spread", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=31)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((args.rows, args.vocab)) * args.spread).astype(np.float32)
    print(f"{'us a row':22}", *(f"{isa:>12}" for isa in args.isa), f"{'numpy':>12}")
    for name, how in CASES.items():
        rows = np.zeros(args.rows, SAMPLE_ROW)
        rows["repetition_penalty"], rows["top_p"] = 1.0, 1.0
        rows["target"], rows["num_logprobs"] = -1, -1
        rows["seed"] = rng.integers(0, 2**63, args.rows)
        for field, value in how.items():
            rows[field] = value
        raw = rows.view(np.uint8).reshape(args.rows, SAMPLE_ROW.itemsize)
        batch = SampleBatch(rows)
        cells = []
        theirs, expected = median_of(3, lambda: rules.sample_rows(logits, batch))  # noqa: B023
        for isa in args.isa:
            ours, sampled = median_of(
                args.repeats,
                lambda: _native.sample(isa, logits, raw, None, 0),  # noqa: B023
            )
            if sampled[0].tolist() != expected.sampled.tolist():
                raise SystemExit(f"{name}: {isa} draws other tokens than the rules")
            cells.append(ours)
        print(f"{name:22}", *(f"{1e6 * one / args.rows:12.1f}" for one in [*cells, theirs]))


if __name__ == "__main__":
    main()
