"""``steppe plan``: what clients of a deployment would see, predicted from a recorded run."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from steppe.cli.common import size
from steppe.cli.schedule import add_objectives, add_schedule, arrivals, check_schedule, objectives
from steppe.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from rich.table import Table

    from steppe.bench.cost import CostModel, Observed
    from steppe.bench.simulate import Deployment, Occupancy
    from steppe.bench.stats import Quantiles, Summary
    from steppe.bench.sweep import Sweep

T = TypeVar("T")

__all__ = ["add_arguments", "run"]

SCHEMA = 1
SHORT = {"max_batch_size": "seats", "max_step_tokens": "step", "kv_memory": "memory",
         "scheduling": "order", "max_pending": "pending"}  # fmt: skip
"""What is varied, as the head of a column."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "recording", metavar="RECORDING", type=Path,
        help="a run to learn from: steppe bench --model MODEL --record FILE",
    )  # fmt: skip
    add_schedule(parser.add_argument_group("the load"), requests=200)

    engine = parser.add_argument_group(
        "the deployment (default: the recorded one; several values, as in 8,16,32, are compared)"
    )
    engine.add_argument(
        "--max-batch-size", type=_several(_count), metavar="N,..", help="sequences that run at once"
    )
    engine.add_argument(
        "--max-step-tokens", type=_several(_step_tokens), metavar="N,..",
        help="most tokens of one step, or auto for steps of about 50 ms",
    )  # fmt: skip
    engine.add_argument(
        "--kv-memory", type=_several(size), metavar="SIZE,..",
        help="memory for the cache, such as 512M or 2G",
    )  # fmt: skip
    engine.add_argument(
        "--scheduling", type=_several(_scheduling), metavar="HOW,..", help="fcfs or fair"
    )
    engine.add_argument(
        "--max-pending", type=_several(_count), metavar="N,..", help="sequences that run or wait"
    )

    judged = parser.add_argument_group("what is good, and what comes out")
    add_objectives(judged)
    judged.add_argument("--json", type=Path, metavar="FILE", help="write every number there")


def _several(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    def parse(text: str) -> list[T]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = kind.__name__.strip("_").replace("_", " ")
    return parse


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def _step_tokens(text: str) -> int | str:
    return text if text == "auto" else _count(text)


def _scheduling(text: str) -> str:
    if text not in ("fcfs", "fair"):
        raise ValueError(text)
    return text


def run(arguments: argparse.Namespace) -> int:
    """Predict, and say so; 1 if no request would have an answer."""
    from rich.console import Console

    from steppe.bench import report
    from steppe.bench.cost import fit, observe

    check_schedule(arguments)
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise ConfigError("json", f"there is no folder {arguments.json.parent}")
    observed = observe(arguments.recording)
    model = fit(observed)
    variants = [_Variant(arguments, observed, model, given) for given in _combinations(arguments)]
    for variant in variants:
        variant.predict()
    console = Console(highlight=False)
    for line in describe(observed, model):
        print(line)
    if len(variants) == 1:
        (variant,) = variants
        console.print(report.latency_table(variant.summary, variant.title))
        for line in report.remarks(variant.summary):
            print(line)
        print(_fullness(variant.occupancy))
        if variant.sweep is not None:
            print(report.saturation(variant.sweep))
    else:
        console.print(_comparison(variants))
    for line in _beyond(observed, variants):
        print(line)
    if arguments.json is not None:
        whole = _as_json(arguments, model, variants)
        arguments.json.write_text(json.dumps(whole, allow_nan=False) + "\n", encoding="utf-8")
    sys.stdout.flush()
    return 0 if any(variant.summary.completed for variant in variants) else 1


class _Variant:
    """One deployment, and what was predicted for it."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        observed: Observed,
        model: CostModel,
        given: dict[str, Any],
    ) -> None:
        from steppe.bench.simulate import Deployment

        self._arguments = arguments
        self._model = model
        self.given = given
        self.deployment: Deployment = Deployment.of(observed.header, **given)
        self.sweep: Sweep | None = None
        self.summary: Summary
        self.occupancy: Occupancy

    @property
    def title(self) -> str:
        """What distinguishes it."""
        return ", ".join(f"{name} {value}" for name, value in self.given.items()) or "as recorded"

    def predict(self) -> None:
        """At the rate or on the trace; with --sweep at the rate that was sustained."""
        from steppe.bench.sweep import sweep

        arguments = self._arguments
        rate = None if arguments.trace is not None else arguments.rate
        if arguments.sweep:
            self.sweep = asyncio.run(sweep(self._measured, arguments.rate))
            rate = self.sweep.sustained or self.sweep.runs[0][0]
        self._measure(rate)

    async def _measured(self, rate: float) -> Summary:
        return self._measure(rate)

    def _measure(self, rate: float | None) -> Summary:
        from steppe.bench.simulate import simulate
        from steppe.bench.stats import summarize

        arguments = self._arguments
        done = simulate(arrivals(arguments, rate), self._model, self.deployment, arguments.seed)
        self.occupancy = done.occupancy
        self.summary = summarize(done.samples, objectives(arguments))
        return self.summary


def _combinations(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    given = {name: getattr(arguments, name) for name in SHORT}
    chosen = {name: values for name, values in given.items() if values is not None}
    return [dict(zip(chosen, values, strict=True)) for values in product(*chosen.values())]


def describe(observed: Observed, model: CostModel) -> list[str]:
    """The fitted prices in words, and how well they fit."""
    from steppe.bench.cost import PARTS
    from steppe.bench.report import duration

    prices = [
        f"{duration(price)} per {part}"
        for part, price in zip(PARTS, model.prices, strict=True)
        if price
    ]
    return [
        f"{observed.header.get('model', 'a model')}, {len(observed.steps)} recorded steps:",
        f"{', '.join(prices)}",
        f"half of the steps are priced within {model.off_by(0.5):.0%}, nine of ten within"
        f" {model.off_by(0.9):.0%}; between steps {duration(model.gap[0])} and"
        f" {duration(model.gap[1])} a sequence",
    ]


def _fullness(occupancy: Occupancy) -> str:
    pages = ""
    if occupancy.most_pages >= 0.0005:
        pages = f"; pages {occupancy.mean_pages:.1%} full, at most {occupancy.most_pages:.1%}"
    return (
        f"busy {occupancy.busy:.0%} of the time in {occupancy.steps} steps of"
        f" {occupancy.mean_batch:.1f} sequences, at most {occupancy.most_batch}{pages}"
    )


def _beyond(observed: Observed, variants: Sequence[_Variant]) -> list[str]:
    """Warnings where a prediction is about something that the recording has not seen."""
    batch = max(variant.occupancy.most_batch for variant in variants)
    tokens = max(variant.occupancy.most_step_tokens for variant in variants)
    lines = []
    if batch > observed.most_seated:
        lines.append(
            f"warning: the recording has at most {observed.most_seated} sequences at once, this"
            f" plan {batch}: record a run under more load"
        )
    if tokens > observed.most_tokens:
        lines.append(
            f"warning: the recording has steps of at most {observed.most_tokens} tokens, this plan"
            f" {tokens}: record a run with longer ones"
        )
    return lines


def _comparison(variants: Sequence[_Variant]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    swept = any(variant.sweep is not None for variant in variants)
    table = Table(
        title="rate: the highest sustained; TTFT and ITL: p50/p99 in ms", title_justify="left",
        box=SIMPLE_HEAD, padding=0,
    )  # fmt: skip
    varied = [SHORT[name] for name in variants[0].given]
    seen = ["served", "good", "tok/s", "TTFT", "ITL", "batch", "pages", "busy"]
    for name in (*varied, *(["rate"] if swept else []), *seen):
        table.add_column(name, justify="right", no_wrap=True)
    for variant in variants:
        summary, full, sweep = variant.summary, variant.occupancy, variant.sweep
        rate = f"{sweep.sustained:.3g}" if sweep is not None and sweep.sustained else "-"
        table.add_row(
            *(_shown(name, value) for name, value in variant.given.items()),
            *([rate] if swept else []),
            f"{summary.served:.3g}",
            f"{summary.good:.0%}",
            f"{summary.output_rate:.0f}",
            _pair(summary.first),
            _pair(summary.between),
            f"{full.mean_batch:.1f}",
            f"{full.most_pages:.0%}",
            f"{full.busy:.0%}",
        )
    return table


def _pair(values: Quantiles) -> str:
    if values.p50 is None or values.p99 is None:
        return "-"
    digits = 0 if values.p50 >= 0.0995 else 1
    return f"{values.p50 * 1000:.{digits}f}/{values.p99 * 1000:.{digits}f}"


def _shown(name: str, value: object) -> str:
    return f"{value / 2**20:.0f}M" if name == "kv_memory" and isinstance(value, int) else str(value)


def _as_json(
    arguments: argparse.Namespace, model: CostModel, variants: Sequence[_Variant]
) -> dict[str, Any]:
    from steppe.bench.cost import PARTS

    return {
        "schema": SCHEMA,
        "kind": "steppe-plan",
        "recording": arguments.recording.name,
        "prices": dict(zip(PARTS, model.prices, strict=True)),
        "gap": model.gap,
        "admission": model.admission,
        "variants": [
            {
                "deployment": asdict(variant.deployment),
                "occupancy": asdict(variant.occupancy),
                "sweep": None
                if variant.sweep is None
                else {"sustained": variant.sweep.sustained, "exceeded": variant.sweep.exceeded},
                "summary": variant.summary.as_json(),
            }
            for variant in variants
        ],
    }
