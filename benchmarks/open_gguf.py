"""Opening a GGUF file with its whole vocabulary: our reader against the `gguf` package's.

    python benchmarks/open_gguf.py [FILE] [--runs 5]

FILE defaults to the packaged `gemma3-270m`, whose vocabulary has 262,144 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gguf import GGUFReader

from steppe.formats.gguf import read_gguf
from steppe.formats.resolve import resolve

if TYPE_CHECKING:
    from collections.abc import Callable


def ours(path: Path) -> int:
    """Header, tensor table and every token as text."""
    return len(list(read_gguf(path).metadata["tokenizer.ggml.tokens"]))


def theirs(path: Path) -> int:
    """The same with the `gguf` package."""
    field = GGUFReader(path).get_field("tokenizer.ggml.tokens")
    assert field is not None
    return len(field.contents())


def timed(call: Callable[[Path], int], path: Path) -> float:
    """Seconds one call took."""
    start = time.perf_counter()
    call(path)
    return time.perf_counter() - start


def main() -> None:
    """Run both in turn and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default="gemma3-270m")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    path = Path(resolve(arguments.file).path)
    assert ours(path) == theirs(path)
    pairs = [(timed(ours, path), timed(theirs, path)) for _ in range(arguments.runs)]
    mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{path.name}: ours {mine:.3f} s, gguf {other:.3f} s, ratio {other / mine:.1f}")


if __name__ == "__main__":
    main()
