"""What a run measured, as a table and as JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from steppe import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from steppe.bench.stats import Quantiles, Sample, Summary
    from steppe.bench.sweep import Sweep

__all__ = [
    "SCHEMA",
    "duration",
    "latency_table",
    "remarks",
    "report_json",
    "saturation",
    "sweep_table",
]

SCHEMA = 1


def duration(seconds: float | None) -> str:
    """Three digits and a unit; a dash for nothing."""
    if seconds is None:
        return "-"
    if abs(seconds) < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def latency_table(summary: Summary, title: str) -> Table:
    """Percentiles of the three latencies, and of the gaps between chunks."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("mean", "p50", "p90", "p99", "most"):
        table.add_column(name, justify="right", no_wrap=True)

    def row(name: str, values: Quantiles) -> None:
        numbers = (values.mean, values.p50, values.p90, values.p99, values.most)
        table.add_row(name, *map(duration, numbers))

    row("time to first token", summary.first)
    row("between tokens", summary.between)
    row("between chunks", summary.gaps)
    row("end to end", summary.whole)
    return table


def remarks(summary: Summary) -> list[str]:
    """The rest of a summary in words, with a warning where the measurement deserves one."""
    lines = [
        f"{summary.completed} of {summary.requests} requests answered in"
        f" {duration(summary.seconds)}: {summary.served:.3g} a second of"
        f" {summary.offered:.3g} offered",
        f"{summary.output_rate:.4g} output tokens a second"
        f" ({summary.output_tokens} out, {summary.prompt_tokens} in)",
    ]
    wanted = summary.objectives
    if wanted.first is not None or wanted.between is not None:
        limits = [
            f"{name} within {duration(limit)}"
            for name, limit in (
                ("first token", wanted.first),
                ("tokens", wanted.between),
            )
            if limit is not None
        ]
        lines.append(
            f"goodput {summary.goodput:.3g} a second: {summary.good:.1%} had {' and '.join(limits)}"
        )
    if summary.errors:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary.errors.items())
        lines.append(f"errors: {kinds}")
    if summary.drift > 0.1:
        lines.append(
            f"the server did not keep up: each second, answers took {summary.drift:.2f} s longer"
        )
    if summary.late:
        lines.append(
            f"warning: {summary.late} requests were sent late, by up to"
            f" {duration(summary.lateness.most)}: the load generator was too slow (their latencies"
            " count from when they were due)"
        )
    return lines


def sweep_table(sweep: Sweep, kept: Mapping[float, bool]) -> Table:
    """One line for each rate; ``kept`` says which were sustained. TTFT: time to first token, ITL:
    between tokens.
    """
    table = Table(title="sweep", title_justify="left", box=SIMPLE_HEAD, padding=0)
    for name in ("rate", "served", "good", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99",
                 "drift", "kept up"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for rate, summary in sweep.runs:
        table.add_row(
            f"{rate:.3g}",
            f"{summary.served:.3g}",
            f"{summary.good:.0%}",
            f"{summary.output_rate:.4g}",
            duration(summary.first.p50),
            duration(summary.first.p99),
            duration(summary.between.p50),
            duration(summary.between.p99),
            f"{summary.drift:.2f}",
            "yes" if kept[rate] else "no",
        )
    return table


def saturation(sweep: Sweep) -> str:
    """Where the saturation lies, in words."""
    if sweep.sustained is None:
        return f"no rate was sustained, down to {sweep.runs[0][0]:.3g} requests a second"
    if sweep.exceeded is None:
        return f"every rate was sustained, up to {sweep.sustained:.3g} requests a second"
    return f"saturation between {sweep.sustained:.3g} and {sweep.exceeded:.3g} requests a second"


def report_json(
    target: str,
    settings: Mapping[str, Any],
    runs: Sequence[tuple[float | None, Summary, Sequence[Sample]]],
    sweep: Sweep | None,
) -> dict[str, Any]:
    """Everything: settings, summaries, and each request's times in seconds."""
    return {
        "schema": SCHEMA,
        "kind": "steppe-bench",
        "version": __version__,
        "target": target,
        "settings": {name: _finite(value) for name, value in settings.items()},
        "runs": [
            {
                "rate": _finite(rate),
                "summary": summary.as_json(),
                "requests": [
                    {
                        "index": one.index,
                        "due": one.due,
                        "sent": one.sent,
                        "ended": one.ended,
                        "chunks": list(one.chunks),
                        "prompt_tokens": one.prompt_tokens,
                        "output_tokens": one.tokens,
                        "error": one.error,
                    }
                    for one in samples
                ],
            }
            for rate, summary, samples in runs
        ],
        "sweep": None
        if sweep is None
        else {"sustained": sweep.sustained, "exceeded": sweep.exceeded},
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity: a rate without a limit is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
