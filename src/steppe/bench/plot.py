"""A run as a picture. Drawn by matplotlib, which is asked for only when a plot is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from steppe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from steppe.bench.stats import Sample
    from steppe.bench.sweep import Sweep

__all__ = ["check_plotting", "plot_run", "plot_sweep"]

AGG = "matplotlib.backends.backend_agg"


def check_plotting() -> None:
    """Raise ConfigError now, before anything is measured, if no plot could be drawn."""
    try:
        importlib.import_module(AGG)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "plot", f"needs {error.name}: install the extra `steppe[bench]`"
        ) from error


def plot_run(path: Path, samples: Sequence[Sample], title: str) -> None:
    """Latencies of each request over the time it was due, and how they are distributed."""
    done = [one for one in samples if one.error is None]
    figure = _figure(title)
    over_time, spread = figure.subplots(1, 2)
    for name, values in _latencies(done):
        over_time.plot([due for due, _ in values], [v for _, v in values], ".", label=name)
        ordered = sorted(value for _, value in values)
        shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
        spread.step(ordered, shares, where="post", label=name)
    for one in samples:
        if one.error is not None:
            over_time.axvline(one.due, color="tab:red", alpha=0.3, linewidth=0.8)
    over_time.set(xlabel="due (s); red: errors", ylabel="seconds")
    spread.set(xlabel="seconds", ylabel="share of requests", ylim=(0, 1))
    if done:  # nothing has no logarithm
        over_time.set(yscale="log")
        spread.set(xscale="log")
    for axes in (over_time, spread):
        axes.grid(visible=True, alpha=0.3)
        if done:
            axes.legend(fontsize="small")
    figure.savefig(path, format="png")


def plot_sweep(path: Path, sweep: Sweep, title: str) -> None:
    """Throughput and latency over the offered rate, with the highest that was sustained."""
    figure = _figure(title)
    throughput, latency = figure.subplots(1, 2)
    rates = [rate for rate, _ in sweep.runs]
    throughput.plot(rates, [one.served for _, one in sweep.runs], "o-", label="served")
    throughput.plot(rates, [one.goodput for _, one in sweep.runs], "s--", label="goodput")
    throughput.set(xlabel="offered (requests/s)", ylabel="requests/s")
    for name, which in (("first token", "first"), ("between tokens", "between")):
        for at, line in (("p50", "o-"), ("p99", "s--")):
            values = [getattr(getattr(one, which), at) for _, one in sweep.runs]
            latency.plot(rates, [value or float("nan") for value in values], line,
                         label=f"{name}, {at}")  # fmt: skip
    latency.set(xlabel="offered (requests/s)", ylabel="seconds")
    if any(summary.completed for _, summary in sweep.runs):
        latency.set(yscale="log")
    for axes in (throughput, latency):
        if sweep.sustained is not None:
            axes.axvline(sweep.sustained, color="tab:gray", linestyle=":")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, format="png")


def _latencies(done: Sequence[Sample]) -> list[tuple[str, list[tuple[float, float]]]]:
    named: list[tuple[str, list[tuple[float, float | None]]]] = [
        ("first token", [(one.due, one.first) for one in done]),
        ("between tokens", [(one.due, one.between) for one in done]),
        ("end to end", [(one.due, one.whole) for one in done]),
    ]
    return [
        (name, [(due, value) for due, value in values if value is not None])
        for name, values in named
    ]


def _figure(title: str) -> Any:
    # Without pyplot: no global state, no display.
    figure_module: Any = importlib.import_module("matplotlib.figure")
    agg: Any = importlib.import_module(AGG)
    figure = figure_module.Figure(figsize=(11, 4.2), layout="constrained")
    agg.FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure
