"""``steppe build``: pack a model into an engine directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from steppe.runtime.building import build_engine

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a directory, a .gguf file, a hub id (org/repo, org/repo:Q4_K_M) or a packaged name",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=Path,
        required=True,
        help="the engine directory; one that is there is replaced, anything else is not",
    )
    parser.add_argument(
        "--quantize",
        choices=("q8", "q4"),
        help="store a float checkpoint's matrices in 8 or 4 bits (default: as they are)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Build it, showing progress, and print where it is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"packing {arguments.model}", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        built = build_engine(
            arguments.model, arguments.output, quantize=arguments.quantize, on_progress=show
        )
    print(f"{built.path}: {built.name}, {built.weight_bytes / 2**20:.1f} MiB of packed weights")
    return 0
