"""``steppe bench``: load for any OpenAI-compatible server, or for an engine in this process."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe.cli.common import add_running_arguments, load
from steppe.cli.schedule import add_objectives, add_schedule, arrivals, check_schedule, objectives
from steppe.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Sequence

    from rich.console import Console

    from steppe.bench.schedule import Arrival
    from steppe.bench.stats import Objectives, Sample, Summary
    from steppe.bench.sweep import Sweep
    from steppe.bench.target import Target

    Run = tuple[float | None, Summary, Sequence[Sample]]

__all__ = ["add_arguments", "run"]

API_KEY_VARIABLE = "STEPPE_API_KEY"
SETTINGS = ("rate", "requests", "trace", "prompt_tokens", "output_tokens", "shared_prefix", "seed",
            "slo_ttft", "slo_itl", "timeout", "chat", "ignore_eos", "warmup")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    where = parser.add_argument_group("what is put under load (one of --url and --model, or both)")
    where.add_argument("--url", help="a server, such as http://127.0.0.1:8000")
    where.add_argument(
        "--model", help="with --url, its name there (default: the first listed); else run it here"
    )
    where.add_argument("--api-key", metavar="KEY", help=f"default: {API_KEY_VARIABLE}, or none")
    where.add_argument("--chat", action="store_true", help="ask as a chat, not as a completion")

    load_group = parser.add_argument_group("the load")
    add_schedule(load_group, requests=50)
    load_group.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N",
        help="tokens that all prompts begin with (default: 0)",
    )  # fmt: skip
    load_group.add_argument(
        "--stop-at-eos", dest="ignore_eos", action="store_false",
        help="let the model end early; also for servers that do not know ignore_eos",
    )  # fmt: skip
    load_group.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for one answer (default: 600)"
    )
    load_group.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="requests not counted (default: 2)"
    )

    judged = parser.add_argument_group("what is good, and what comes out")
    add_objectives(judged)
    judged.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    judged.add_argument(
        "--record", type=Path, metavar="FILE.jsonl",
        help="with --model alone: write every step there, for steppe plan and trace",
    )  # fmt: skip
    judged.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (steppe[bench])")

    add_running_arguments(parser)
    parser.add_argument("--max-batch-size", type=int, default=32, help="sequences that run at once")
    parser.add_argument("--max-pending", type=int, default=256, help="sequences that run or wait")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and say what came of it; 1 if no request had an answer."""
    from rich.console import Console

    _check(arguments)
    wanted = objectives(arguments)
    console = Console(stderr=True)
    if arguments.url is not None:
        runs, sweep, name = asyncio.run(_measure_url(arguments, wanted, console))
    else:
        with load(
            arguments,
            max_batch_size=arguments.max_batch_size,
            max_pending=arguments.max_pending,
        ) as llm:
            from steppe.bench.target import LocalTarget
            from steppe.client import LocalClient

            if arguments.record is not None:
                llm.record(arguments.record)
            target = LocalTarget(LocalClient.of(llm), ignore_eos=arguments.ignore_eos)
            runs, sweep = asyncio.run(_measure(target, arguments, wanted, console))
            name = target.name
    _report(arguments, runs, sweep, name)
    return 0 if any(summary.completed for _, summary, _ in runs) else 1


def _check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for what would only be found out after the measurement."""
    if arguments.url is None and arguments.model is None:
        raise ConfigError("bench", "give --url, or --model to run one in this process")
    if arguments.chat and arguments.url is None:
        raise ConfigError("chat", "is for --url")
    if arguments.record is not None and arguments.url is not None:
        raise ConfigError("record", "writes down an engine in this process: give --model alone")
    check_schedule(arguments)
    if not arguments.timeout > 0:
        raise ConfigError("timeout", f"must be more than 0 seconds, not {arguments.timeout!r}")
    for name in ("shared_prefix", "warmup"):
        if getattr(arguments, name) < 0:
            raise ConfigError(name, "must not be negative")
    for name in ("json", "plot", "record"):
        path = getattr(arguments, name)
        if path is not None and not path.parent.is_dir():
            raise ConfigError(name, f"there is no folder {path.parent}")
    if arguments.plot is not None:
        from steppe.bench.plot import check_plotting

        check_plotting()


async def _measure_url(
    arguments: argparse.Namespace, wanted: Objectives, console: Console
) -> tuple[list[Run], Sweep | None, str]:
    from steppe.bench.http import HttpTarget

    target = HttpTarget(
        arguments.url,
        model=arguments.model,
        api_key=arguments.api_key or os.environ.get(API_KEY_VARIABLE),
        chat=arguments.chat,
        ignore_eos=arguments.ignore_eos,
    )
    await target.find_model()
    return *await _measure(target, arguments, wanted, console), target.name


async def _measure(
    target: Target, arguments: argparse.Namespace, wanted: Objectives, console: Console
) -> tuple[list[Run], Sweep | None]:
    from steppe.bench.stats import summarize
    from steppe.bench.sweep import sweep

    runs: list[Run] = []

    async def measure(rate: float | None) -> Summary:
        coming = arrivals(arguments, rate)
        said = "a trace" if rate is None else f"{rate:.3g} a second"
        async with _progress(console, len(coming), said) as on_end:
            samples = await _run(target, coming, arguments, on_end, len(runs) + 1)
        summary = summarize(samples, wanted)
        runs.append((rate, summary, samples))
        return summary

    if arguments.warmup:
        warm = arrivals(arguments, math.inf, arguments.warmup)
        await _run(target, warm, arguments, None, 0)
    if not arguments.sweep:
        await measure(None if arguments.trace is not None else arguments.rate)
        return runs, None
    found = await sweep(measure, arguments.rate)
    runs.sort(key=lambda run: run[0] or 0.0)
    return runs, found


async def _run(
    target: Target,
    coming: Sequence[Arrival],
    arguments: argparse.Namespace,
    on_end: Any,
    number: int,
) -> list[Sample]:
    from steppe.bench.load import run_load
    from steppe.bench.schedule import prompt_text

    prefix, seed = arguments.shared_prefix, arguments.seed
    prompts = [prompt_text(one, prefix, seed, number) for one in coming]
    return await run_load(target, coming, prompts, give_up=arguments.timeout, on_end=on_end)


@asynccontextmanager
async def _progress(console: Console, total: int, said: str) -> AsyncIterator[Any]:
    """A line on a terminal that counts answers; drawn once a second, not once an answer."""
    ended = errors = 0

    def on_end(sample: Sample) -> None:
        nonlocal ended, errors
        ended += 1
        errors += sample.error is not None

    async def show(status: Any) -> None:
        while True:
            tail = f", {errors} errors" if errors else ""
            status.update(f"{said}: {ended} of {total} ended{tail}")
            await asyncio.sleep(1)

    if not console.is_terminal:
        yield on_end
        return
    with console.status(said, refresh_per_second=2) as status:
        task = asyncio.create_task(show(status))
        try:
            yield on_end
        finally:
            task.cancel()


def _report(
    arguments: argparse.Namespace, runs: Sequence[Run], sweep: Sweep | None, name: str
) -> None:
    from rich.console import Console

    from steppe.bench import report
    from steppe.bench.sweep import sustained

    console = Console(highlight=False)
    if sweep is not None:
        kept = {rate: sustained(summary) for rate, summary in sweep.runs}
        console.print(report.sweep_table(sweep, kept))
        print(report.saturation(sweep))
    else:
        ((_, summary, _),) = runs
        console.print(report.latency_table(summary, name))
        for line in report.remarks(summary):
            print(line)
    if arguments.json is not None:
        settings = {key: getattr(arguments, key) for key in SETTINGS}
        settings["trace"] = None if arguments.trace is None else arguments.trace.name
        whole = report.report_json(name, settings, runs, sweep)
        arguments.json.write_text(json.dumps(whole, allow_nan=False, default=str) + "\n")
    if arguments.plot is not None:
        from steppe.bench.plot import plot_run, plot_sweep

        if sweep is not None:
            plot_sweep(arguments.plot, sweep, name)
        else:
            plot_run(arguments.plot, runs[0][2], name)
    sys.stdout.flush()
