"""``steppe serve`` against other servers on this CPU: latencies under a load, and saturation.

    python benchmarks/compare_serving.py \\
        --server "llama-server=PEERS/bin/llama-server -m FILE -np 32 -c 16384 -t 2 --port {port}"

A server is ``LABEL=COMMAND``; ``{port}`` in the command becomes a free port. It must speak OpenAI's
completions and know ``ignore_eos``. Workload W4: Poisson arrivals, prompts of 64 to 256 tokens,
answers of 64, greedy. The load generator is that of ``steppe bench``.

The servers take turns, each started anew for every run, so that a machine that slows down slows
all. A cell is a median over the runs, with its range; the last column is how many times better
Steppe is than the best peer. ``--keep FILE`` adds this invocation's runs to those of earlier ones,
for machines that are quiet for minutes only. Inter-token times are gaps between two pieces of text
of one answer.
``--sweep`` finds the highest rate that each sustains (no errors, latency that does not drift, nine
of ten first tokens within --slo-ttft) instead of measuring at one rate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from typing import TYPE_CHECKING

from driver import as_installed, peak_memory
from limits import limits

from steppe.bench.http import HttpTarget
from steppe.bench.load import run_load
from steppe.bench.report import saturation, sweep_table
from steppe.bench.schedule import Lengths, poisson, prompt_text
from steppe.bench.stats import Objectives, Summary, summarize
from steppe.bench.sweep import sustained, sweep
from steppe.bench.target import AnswerError

if TYPE_CHECKING:
    from collections.abc import Iterator

OURS = "Steppe"
PROMPT, OUTPUT, WARM_UP = Lengths(64, 256), Lengths(64, 64), 8
PATIENCE = 240.0
"""Seconds that a server may take to start, and an answer to come."""
LESS_IS_BETTER = "ms", "s", "MB"


@dataclass(slots=True)
class Load:
    """What is sent; prompts differ in every run of a process and between processes."""

    requests: int
    objectives: Objectives
    seed: int
    runs: int = 0

    async def send(self, target: HttpTarget, rate: float, seed: int) -> Summary:
        """One run at that rate; the same ``seed`` sends the same lengths at the same times."""
        self.runs += 1
        arrivals = poisson(rate, self.requests, PROMPT, OUTPUT, seed)
        prompts = [prompt_text(one, 0, self.seed, self.runs) for one in arrivals]
        samples = await run_load(target, arrivals, prompts, give_up=PATIENCE)
        return summarize(samples, self.objectives)

    async def warm(self, target: HttpTarget) -> None:
        """Some requests at once, not counted."""
        self.runs += 1
        arrivals = poisson(float("inf"), WARM_UP, PROMPT, Lengths(4, 4), 0)
        prompts = [prompt_text(one, 0, self.seed, self.runs) for one in arrivals]
        await run_load(target, arrivals, prompts, give_up=PATIENCE)


class Server:
    """A server in a process of its own, from its start to the answer that shows it is up."""

    def __init__(self, command: str, port: int) -> None:
        started = time.perf_counter()
        self.process = subprocess.Popen(
            shlex.split(command.replace("{port}", str(port))),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=as_installed(),
        )  # fmt: skip
        self.target = HttpTarget(f"http://127.0.0.1:{port}")
        asyncio.run(self._first_answer(command, started + PATIENCE))
        self.start = time.perf_counter() - started

    async def _first_answer(self, command: str, until: float) -> None:
        while True:
            try:
                await self.target.find_model()
                await self.target.answer("Once upon a time", 1, lambda: None)
                return
            except AnswerError as error:
                if self.process.poll() is not None or time.perf_counter() > until:
                    self.process.kill()
                    sys.exit(f"{command}: no answer: {error}")
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        """Ask it to end, and wait."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def running(command: str) -> Iterator[Server]:
    """A server, up until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(command, port)
    try:
        yield server
    finally:
        server.stop()


def cells(summary: Summary, server: Server) -> dict[str, float]:
    """One run as the rows of the table."""
    first, gaps = summary.first, summary.gaps
    return {
        "TTFT p50, ms": (first.p50 or 0) * 1e3,
        "TTFT p99, ms": (first.p99 or 0) * 1e3,
        "inter-token p50, ms": (gaps.p50 or 0) * 1e3,
        "inter-token p99, ms": (gaps.p99 or 0) * 1e3,
        "output tokens/s": summary.output_rate,
        "goodput, requests/s": summary.goodput,
        "drift, seconds a second": summary.drift,
        "start to first token, s": server.start,
        "peak memory, MB": peak_memory(server.process.pid) / 2**20,
    }


def table(results: dict[str, list[dict[str, float]]]) -> None:
    """Print medians, ranges and ratios."""
    names = list(results)
    print("| | " + " | ".join(names) + " | times better |")
    print("| --- |" + " --- |" * (len(names) + 1))
    for row in results[OURS][0]:
        medians = {
            name: statistics.median(run[row] for run in runs) for name, runs in results.items()
        }
        shown = []
        for name, runs in results.items():
            values = [run[row] for run in runs]
            shown.append(f"{medians[name]:.3g} [{min(values):.3g}-{max(values):.3g}]")
        others = [medians[name] for name in names[1:]]
        ratio = "-"
        if others and not row.startswith("drift"):
            less = row.rpartition(", ")[2] in LESS_IS_BETTER
            ours = medians[OURS]
            better = min(others) / ours if less and ours else ours / max(others)
            ratio = f"{better:.2f}"
        print(f"| {row} | " + " | ".join([*shown, ratio]) + " |")


def main() -> None:
    """Run everything and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="what steppe serves")
    parser.add_argument("--server", action="append", default=[], metavar="LABEL=COMMAND")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rate", type=float, default=4.0, help="of W4; where a sweep starts")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--slo-ttft", type=float, default=2.0, help="seconds to the first token")
    parser.add_argument("--sweep", action="store_true", help="find the saturation instead")
    parser.add_argument("--rounds", type=int, default=3, help="halvings of a sweep's interval")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add to what is there")
    parser.add_argument("--quick", action="store_true", help="one run of 60 requests")
    arguments = parser.parse_args()
    # Whoever ends this ends the servers too: they would be measured with the next run otherwise.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    if arguments.quick:
        arguments.requests, arguments.runs = 60, 1
    ours = (
        f"{shlex.quote(sys.executable)} -m steppe serve {shlex.quote(arguments.model)}"
        f" --port {{port}} --threads {arguments.threads}"
    )
    commands = {OURS: ours}
    for server in arguments.server:
        label, _, command = server.partition("=")
        commands[label] = command
    load = Load(arguments.requests, Objectives(arguments.slo_ttft), time.time_ns())
    print(limits(arguments.threads), flush=True)
    if arguments.sweep:
        saturations(commands, load, arguments.rate, arguments.rounds)
        return
    results: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    if arguments.keep is not None and arguments.keep.exists():
        results = json.loads(arguments.keep.read_text())
        if list(results) != list(commands):
            sys.exit(f"{arguments.keep} is about {', '.join(results)}")
    before = len(results[OURS])
    for number in range(before, before + arguments.runs):
        for name, command in commands.items():
            with running(command) as server:
                asyncio.run(load.warm(server.target))
                summary = asyncio.run(load.send(server.target, arguments.rate, number))
                results[name].append(cells(summary, server))
            if summary.errors or summary.late:
                print(f"{name}: errors {summary.errors}, {summary.late} sent late")
        print(limits(arguments.threads), flush=True)
        if arguments.keep is not None:
            arguments.keep.write_text(json.dumps(results))
    print(f"{arguments.rate:g} requests/s, {arguments.requests} in a run")
    table(results)


def saturations(commands: dict[str, str], load: Load, rate: float, rounds: int) -> None:
    """Sweep each server, and print every rate that was tried and where it saturates."""
    from rich.console import Console

    found = {}
    for name, command in commands.items():
        with running(command) as server:
            asyncio.run(load.warm(server.target))

            async def measure(at: float, target: HttpTarget = server.target) -> Summary:
                return await load.send(target, at, 0)

            found[name] = asyncio.run(sweep(measure, rate, rounds=rounds))
        kept = {at: sustained(summary) for at, summary in found[name].runs}
        print(f"{name}: {saturation(found[name])}")
        Console(width=100, highlight=False).print(sweep_table(found[name], kept))
    ours = found[OURS].sustained
    others = [sweep.sustained for name, sweep in found.items() if name != OURS]
    best = max((other for other in others if other is not None), default=None)
    if ours is not None and best is not None:
        print(f"{OURS} sustains {ours / best:.2f} times the rate of the best peer")


if __name__ == "__main__":
    main()
