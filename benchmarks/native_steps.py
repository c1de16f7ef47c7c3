"""Where a whole step's time goes on the native backend.

    python benchmarks/native_steps.py [--model smollm2-135m] [--decode 1 8 32] [--prefill 1024]

Decode steps of so many sequences at a context of 256, and prompts in one step each. First without
the program's clock (milliseconds, tokens per second), then with it: the threads' time by kind of
work, of which "waiting" is what no work accounts for. A decode of one then takes turns with a bare
read of the weights that it multiplies by, which bounds it. Medians; the machine's state before and
after, since figures of different states cannot be compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
from native_kernels import state

from steppe.backends.base import SAMPLE_ROW, SampleBatch, StepInput
from steppe.backends.native import NativeBackend
from steppe.formats.checkpoint import open_checkpoint
from steppe.models.registry import load_model

if TYPE_CHECKING:
    from steppe.backends.base import Program

CONTEXT = 256


class Steps:
    """Synthetic steps over one backend: random tokens, pages in order."""

    def __init__(self, program: Program, threads: int | None, tokens: int) -> None:
        self.backend = NativeBackend(threads=threads)
        self.backend.trace(program)
        self.size = self.backend.page_size
        self.pages = -(-tokens // self.size) + 32
        self.backend.allocate_cache([self.pages] * len(self.backend.groups))
        self.vocab = program.vocab_size
        self.rng = np.random.default_rng(0)

    def make(self, sequences: int, length: int, context: int) -> tuple[StepInput, SampleBatch]:
        """Each sequence feeds ``length`` tokens, its last ones of ``context``."""
        per = -(-context // self.size)
        table = np.arange(sequences * per, dtype=np.int32).reshape(sequences, per)
        at = np.tile(np.arange(context - length, context), sequences)
        rows = np.repeat(np.arange(sequences), length)
        slots = table[rows, at // self.size].astype(np.int64) * self.size + at % self.size
        groups = len(self.backend.groups)
        sample = np.zeros(sequences, SAMPLE_ROW)
        sample["num_logprobs"] = sample["target"] = -1
        ends = np.arange(1, sequences + 1, dtype=np.int32) * length
        step = StepInput(
            token_ids=self.rng.integers(0, self.vocab, sequences * length).astype(np.int32),
            positions=at[None].astype(np.int32),
            query_start=np.concatenate([[0], ends]).astype(np.int32),
            context_len=np.full(sequences, context, np.int32),
            block_tables=(table,) * groups,
            slot_mappings=(slots,) * groups,
            logit_rows=ends - 1,
        )
        return step, SampleBatch(sample)

    def seconds(self, step: StepInput, sample: SampleBatch, repeats: int) -> float:
        """Median time of a step."""
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            self.backend.launch(step, sample).wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])


def beside_reading(steps: Steps, context: int, repeats: int = 60) -> None:
    """Print the time of a decode of one beside that of reading its weights alone, by turns."""
    step, sample = steps.make(1, 1, context)
    times, reads = [], []
    for _ in range(repeats):
        times.append(steps.seconds(step, sample, 1))
        start = time.perf_counter()
        size = steps.backend.read_weights()
        reads.append(time.perf_counter() - start)
    step_time, read = statistics.median(times), statistics.median(reads)
    print(
        f"  by turns {step_time * 1e3:.2f} ms, its {size / 1e6:.0f} MB of weights read alone "
        f"{read * 1e3:.2f} ms ({size / read / 1e9:.1f} GB/s): {step_time / read:.2f} times as long"
    )


def profile(steps: Steps, name: str, sequences: int, length: int, context: int) -> None:
    """Print one case."""
    step, sample = steps.make(sequences, length, context)
    once = steps.seconds(step, sample, 2)
    repeats = max(3, min(80, int(1.5 / once)))
    seconds = steps.seconds(step, sample, repeats)
    print(f"\n{name}: {seconds * 1e3:.2f} ms, {sequences * length / seconds:.0f} tokens/s")
    with steps.backend.timing() as timing:
        steps.seconds(step, sample, repeats)
    threads, whole = steps.backend.threads, timing.wall
    work = sorted(timing.busy.items(), key=lambda item: -item[1])
    rest = threads * whole - sum(timing.busy.values())
    for label, busy in [*work, ("waiting", rest)]:
        share = busy / (threads * whole)
        if busy > 0:
            print(f"  {share:6.1%}  {busy / threads / timing.steps * 1e3:8.3f} ms  {label}")


def main() -> None:
    """Profile the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[1024])
    args = parser.parse_args()
    program = load_model(open_checkpoint(args.model))
    room = max([CONTEXT * count for count in args.decode] + args.prefill)
    steps = Steps(program, args.threads, room)
    state(steps.backend.isa, steps.backend.threads)
    for count in args.decode:
        profile(steps, f"decode of {count} at {CONTEXT}", count, 1, CONTEXT)
        if count == 1:
            beside_reading(steps, CONTEXT)
    for length in args.prefill:
        profile(steps, f"prefill of {length}", 1, length, length)
    state(steps.backend.isa, steps.backend.threads)


if __name__ == "__main__":
    main()
