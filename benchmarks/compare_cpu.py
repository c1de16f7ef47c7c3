"""Steppe against other engines on this CPU, interleaved: decode, batches, long prompts.

    python benchmarks/compare_cpu.py --peer "llama.cpp=llama_cpp:PEERS/bin/python" \\
        --peer "OpenVINO int4=openvino:PEERS/bin/python:DIR" [--rounds 5] [--model FILE]

A peer is ``LABEL=DRIVER:PYTHON[:MODEL]``, where DRIVER is one of ``peers/drive_*.py``, PYTHON an
interpreter that has the peer, and MODEL what it is to load (without it: the same GGUF file as
Steppe); ``steppe`` is a driver too, to compare two files.

In every round each system runs alone, in a process of its own, through the same cases (see
``peers/workloads.py``), so a machine that slows down slows all; the same number of threads is used
everywhere. A cell is a median over the rounds, with its range; the last column is ours over the
best peer's. The first round warms up and does not count. W2 counts output tokens over the whole
time, prompts included. The start is from spawning the process to one token of a short prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).resolve().parent / "peers"
sys.path.insert(0, str(PEERS))

from driver import Driver  # noqa: E402
from limits import Limits, limits  # noqa: E402

from steppe.formats.gguf import read_gguf  # noqa: E402
from steppe.formats.resolve import resolve  # noqa: E402

OURS = "Steppe"
ONE, MANY, PREFILL = "decode, 1 sequence", "{} sequences, prompts included", "prefill, {} tokens"
START, MEMORY = "start to first token, s", "peak memory, MB"
LESS_IS_BETTER = (START, MEMORY)

Results = dict[str, list[dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is run."""

    prompt: int
    output: int
    batches: tuple[int, ...]
    prefills: tuple[int, ...]
    one: bool = True


@dataclass(frozen=True, slots=True)
class Work:
    """What a token costs: bytes of weights that a decode reads, products of the layers, and of the
    head.
    """

    read: int
    layers: int
    head: int

    @classmethod
    def of(cls, path: Path) -> Work:
        """Of a GGUF model."""
        tensors = read_gguf(path).tensors
        matrices = {name: one for name, one in tensors.items() if len(one.shape) == 2}
        head = matrices.pop("output.weight", None) or matrices["token_embd.weight"]
        embedding = matrices.pop("token_embd.weight")
        read = sum(one.nbytes for one in tensors.values())
        if head is not embedding:
            read -= embedding.nbytes
        layers = sum(one.shape[0] * one.shape[1] for one in matrices.values())
        return cls(read, layers, head.shape[0] * head.shape[1])


def measure(driver: Driver, seed: int, sizes: Sizes) -> dict[str, float]:
    """Every case, once: tokens per second, then seconds and megabytes."""
    rates = {}
    prompt, output = sizes.prompt, sizes.output
    if sizes.one:
        times = driver.run(case="one", prompt=prompt, output=output, seed=seed)
        rates[ONE] = (output - 1) / (times["total"] - times["first"])
    for count in sizes.batches:
        times = driver.run(case="many", count=count, prompt=prompt, output=output, seed=seed)
        rates[MANY.format(count)] = count * output / times["total"]
    for length in sizes.prefills:
        times = driver.run(case="prefill", prompt=length, seed=seed)
        rates[PREFILL.format(length)] = length / times["first"]
    rates[START] = driver.first_token
    rates[MEMORY] = driver.peak_memory() / 2**20
    return rates


def table(results: Results) -> None:
    """Print medians, ranges and the ratio to the best peer."""
    names = list(results)
    print("| tokens/s | " + " | ".join(names) + " | x best peer |")
    print("| --- |" + " --- |" * (len(names) + 1))
    for case in results[OURS][0]:
        digits = 2 if case == START else 0
        cells, medians = [], {}
        for name, rounds in results.items():
            values = sorted(each[case] for each in rounds)
            medians[name] = statistics.median(values)
            cells.append(
                f"{medians[name]:.{digits}f} [{values[0]:.{digits}f}-{values[-1]:.{digits}f}]"
            )
        others = [medians[name] for name in names[1:]]
        ratio = "-"
        if others and case in LESS_IS_BETTER:
            ratio = f"{min(others) / medians[OURS]:.2f}"
        elif others:
            ratio = f"{medians[OURS] / max(others):.2f}"
        print(f"| {case} | " + " | ".join([*cells, ratio]) + " |")


def shares(results: Results, work: Work, seen: list[Limits]) -> None:
    """Print how near Steppe came to what bounds it here, by this run's own measurements."""
    read = statistics.median(each.read for each in seen)
    int8 = statistics.median(each.int8 for each in seen)
    ours = {
        case: statistics.median(each[case] for each in results[OURS]) for case in results[OURS][0]
    }
    if ONE in ours:
        share = ours[ONE] * work.read / read
        print(f"{ONE}: {work.read / 1e6:.0f} MB a token, {share:.0%} of the read bandwidth")
    for case, rate in ours.items():
        if case.startswith("prefill"):
            share = rate * 2 * work.layers / int8
            print(f"{case}: {share:.0%} of the int8 rate, attention not counted")


def command(driver: str, python: str, model: str, threads: int) -> list[str]:
    """How a driver is started."""
    script = PEERS / f"drive_{driver}.py"
    if not script.is_file():
        sys.exit(f"there is no driver {driver!r}")
    return [python, str(script), model, "--threads", str(threads)]


def numbers(text: str) -> tuple[int, ...]:
    """``8,16,32``; an empty text is none."""
    return tuple(int(part) for part in text.split(",") if part)


def main() -> None:
    """Run everything and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF model reference")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="LABEL=DRIVER:PYTHON[:MODEL]"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128, help="tokens in (W1, W2)")
    parser.add_argument("--output", type=int, default=128, help="tokens out (W1, W2)")
    parser.add_argument("--batches", type=numbers, default=(8, 16, 32), help="sequences of W2")
    parser.add_argument("--prefills", type=numbers, default=(1024, 2048), help="tokens of W3")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add to what is there")
    parser.add_argument("--no-one", dest="one", action="store_false", help="leave W1 out")
    arguments = parser.parse_args()
    sizes = Sizes(
        arguments.prompt, arguments.output, arguments.batches, arguments.prefills, arguments.one
    )
    path = resolve(arguments.model).path
    commands = {OURS: command("steppe", sys.executable, str(path), arguments.threads)}
    for peer in arguments.peer:
        label, _, rest = peer.partition("=")
        driver, python, *model = rest.split(":", 2)
        commands[label] = command(driver, python, *(model or [str(path)]), arguments.threads)
    results: Results = {name: [] for name in commands}
    before = 0
    if arguments.keep is not None and arguments.keep.exists():
        results = json.loads(arguments.keep.read_text())
        if list(results) != list(commands):
            sys.exit(f"{arguments.keep} is about {', '.join(results)}")
        before = len(results[OURS])
    seen = [limits(arguments.threads)]
    print(f"{Path(path).name}, {arguments.threads} threads, {arguments.rounds} rounds")
    for number in range(-arguments.warm_up, arguments.rounds):
        for name, words in commands.items():
            with Driver(name, words) as driver:
                rates = measure(driver, number % 800 + before, sizes)
            if number >= 0:
                results[name].append(rates)
        if arguments.keep is not None:
            arguments.keep.write_text(json.dumps(results))
        seen.append(limits(arguments.threads))
        print(seen[-1], flush=True)
    print()
    table(results)
    print()
    shares(results, Work.of(Path(path)), seen)


if __name__ == "__main__":
    main()
