"""Arrivals and objectives on a command line: what ``steppe bench`` and ``steppe plan`` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from steppe.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from steppe.bench.schedule import Arrival
    from steppe.bench.stats import Objectives

__all__ = ["add_objectives", "add_schedule", "arrivals", "check_schedule", "objectives"]


def add_schedule(group: argparse._ArgumentGroup, *, requests: int) -> None:
    """When requests come, and how long they are. ``requests`` is how many by default."""
    group.add_argument(
        "--rate", type=float, default=1.0,
        help="arrivals a second, Poisson; inf sends all at once (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--requests", type=int, default=requests, help=f"how many (default: {requests})"
    )
    group.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="arrivals from a CSV file with at, prompt_tokens, output_tokens; instead of --rate",
    )  # fmt: skip
    group.add_argument(
        "--prompt-tokens", default="128", metavar="N|N:M", help="prompt lengths (default: 128)"
    )
    group.add_argument(
        "--output-tokens", default="64", metavar="N|N:M", help="answer lengths (default: 64)"
    )
    group.add_argument("--seed", type=int, default=0, help="repeats a schedule (default: 0)")


def add_objectives(group: argparse._ArgumentGroup) -> None:
    """What counts as good, and whether to look for the saturation."""
    group.add_argument("--slo-ttft", type=float, metavar="SECONDS", help="to the first token")
    group.add_argument("--slo-itl", type=float, metavar="SECONDS", help="from token to token")
    group.add_argument(
        "--sweep", action="store_true", help="find the highest rate that is sustained, from --rate"
    )


def check_schedule(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for objectives and schedules that contradict themselves."""
    if arguments.sweep and arguments.trace is not None:
        raise ConfigError("sweep", "chooses the rates itself, and a trace has its own")
    for name in ("slo_ttft", "slo_itl"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ConfigError(name, f"must be more than 0 seconds, not {value!r}")


def objectives(arguments: argparse.Namespace) -> Objectives:
    """The objectives given."""
    from steppe.bench.stats import Objectives

    return Objectives(arguments.slo_ttft, arguments.slo_itl)


def arrivals(
    arguments: argparse.Namespace, rate: float | None, count: int | None = None
) -> tuple[Arrival, ...]:
    """The trace for a rate of None, else Poisson arrivals at that rate: as many as asked for, or
    ``count``. Raises ConfigError.
    """
    from steppe.bench.schedule import Lengths, poisson, read_trace

    if rate is None:
        return read_trace(arguments.trace)
    prompt, output = Lengths.parse(arguments.prompt_tokens), Lengths.parse(arguments.output_tokens)
    return poisson(rate, count or arguments.requests, prompt, output, arguments.seed)
