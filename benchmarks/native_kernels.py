"""How fast the native kernels are here: ``python benchmarks/native_kernels.py [--threads N]``.

Prints the machine's state first (the time of an empty phase, and what a read of 256 MB reaches on
the pool's own threads), since a vCPU pair may sit behind one cache or two and figures of different
states cannot be compared. Then, for each packed format, one row in GB/s of packed weights, beside
what a bare read of the same matrix reaches by turns with it, and more rows in GOPS (a
multiplication and an addition are two). Medians; weights are zeros. ``--isa`` takes several
variants, which are then measured in turn for each matrix.
"""

from __future__ import annotations

import argparse
import statistics

from steppe.backends.native import _native

FORMATS = {
    "Q4_0": 18 / 32,
    "Q4_1": 20 / 32,
    "Q8_0": 34 / 32,
    "Q5_0": 22 / 32,
    "Q4_K": 144 / 256,
    "Q6_K": 210 / 256,
    "BF16": 2.0,
    "F32": 4.0,
}
SHAPES = ((1536, 576), (576, 1536), (49152, 576), (4096, 4096))
ROWS = (1, 8, 16, 32, 64, 256, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=_native.default_threads())
    parser.add_argument(
        "--isa", nargs="+", default=_native.variants()[:1], choices=_native.variants()
    )
    parser.add_argument("--formats", nargs="+", default=["Q4_1", "Q8_0", "Q4_K", "BF16"])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    state(args.isa[0], args.threads)
    print(
        f"{'variant':12}{'format':>8}{'N x K':>14}{'GB/s, 1 row':>14}{'of read':>10}",
        *(f"{m:>8}" for m in ROWS[1:]),
        "GOPS",
    )
    for name in args.formats:
        for n, k in SHAPES:
            if k % 256 and name.endswith("_K"):
                continue
            for isa in args.isa:
                times = [
                    _native.time_linear(isa, name, m, n, k, args.threads, args.repeats)
                    for m in ROWS
                ]
                one, read = times[0]
                speed = n * k * FORMATS[name] / one / 1e9
                share = f"{read / one:.0%}"
                gops = (
                    2 * m * n * k / t / 1e9 for m, (t, _) in zip(ROWS[1:], times[1:], strict=True)
                )
                print(
                    f"{isa:12}{name:>8}{f'{n} x {k}':>14}{speed:>14.1f}{share:>10}",
                    *(f"{g:>8.0f}" for g in gops),
                )
    state(args.isa[0], args.threads)


def state(isa: str, threads: int) -> None:
    """Print barrier time and read bandwidth."""
    probes = [_native.probe(isa, threads, 256 << 20) for _ in range(3)]
    barrier = statistics.median(each[0] for each in probes)
    read = max(each[1] for each in probes)
    print(
        f"{isa}, {threads} threads: empty phase {barrier * 1e9:.0f} ns, read {read / 1e9:.1f} GB/s"
    )


if __name__ == "__main__":
    main()
