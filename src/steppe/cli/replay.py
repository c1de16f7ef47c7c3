"""``steppe replay FILE``: decide a recorded run again, and show the first difference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from steppe.engine.recording import replay

if TYPE_CHECKING:
    import argparse

    from steppe.stepping.types import ImmutableStepBatch

__all__ = ["add_arguments", "replay_command", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a recording: engine.record(FILE)")


def run(arguments: argparse.Namespace) -> int:
    """Replay it."""
    return replay_command(arguments.file)


def replay_command(path: Path) -> int:
    """Replay ``path`` and print how it went; the exit status is 1 if a decision came out otherwise.

    Raises ConfigError for a file that is no recording, OSError for one that cannot be read.
    """
    done = replay(path)
    if done.divergence is not None:
        print(f"{path}, line {done.divergence.line}: another decision")
        print(f"  recorded: {_describe(done.divergence.recorded)}")
        print(f"  now:      {_describe(done.divergence.planned)}")
        return 1
    print(f"{path}: {done.steps} steps, every one decided the same")
    if done.unplanned:
        print(f"{done.unplanned} steps ran in the fixed prefill-first order")
    return 0


def _describe(batch: ImmutableStepBatch) -> str:
    parts = [
        f"{what} {', '.join(entries)}"
        for what, entries in (
            ("decode", [f"{one.ref.slot}x{one.query_length}" for one in batch.decodes]),
            ("prefill", [f"{one.ref.slot}x{one.num_tokens}" for one in batch.prefills]),
            ("retire", [f"{ref.slot} ({reason})" for ref, reason in batch.retire]),
            ("preempt", [str(ref.slot) for ref in batch.preempt]),
        )
        if entries
    ]
    return "; ".join(parts) or "nothing"
