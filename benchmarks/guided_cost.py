"""What guided decoding costs: ``python benchmarks/guided_cost.py [--model smollm2-135m]``.

Answers with and without a JSON schema take turns, at several numbers of sequences at once, each
with a schema of its own. For each number it prints the median step in which all of them decode,
plain and guided, what was done for guides alone (grammars, masks, rows sampled again and all that
is around them) took of it for each sequence, and which part of a guided step that is. Goal: 5 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe import LLM, Guided, LLMGenerationRequest, SamplingParams
from steppe.runtime import batches, executor
from steppe.runtime.guided.state import GuidedState

if TYPE_CHECKING:
    from collections.abc import Callable


def schema(number: int) -> dict[str, Any]:
    """A list of records, other ones for each number, so long that no answer reaches its end."""
    record = {
        "type": "object",
        "properties": {
            f"name{number}": {"type": "string", "minLength": 3, "maxLength": 40},
            "kind": {"enum": ["river", "mountain", "city", f"other{number}"]},
            "sizes": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 6},
            "old": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string", "pattern": "^[A-Z][a-z ]{5,60}$"}, {"const": 0}]},
        },
        "required": [f"name{number}", "kind", "sizes", "old", "note"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": record, "minItems": 100}


class Stopwatch:
    """Adds up the time spent in some functions; one called by another is counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, timed."""

        def timed(*arguments: Any) -> Any:
            if self._inside:
                return method(*arguments)
            self._inside = True
            start = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - start

        return timed


def steps(
    llm: LLM, count: int, tokens: int, *, guided: bool, seed: int, **sampling: float
) -> list[float]:
    """Seconds of every step in which ``count`` sequences decode and nothing else happens."""
    handles = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.jsonl")
        with llm.record(path):
            prompts = [
                f"List {count} places, number {index + seed}, as JSON:" for index in range(count)
            ]
            params = [
                SamplingParams(
                    seed=seed + index, max_tokens=tokens, ignore_eos=True,
                    guided=Guided(json_schema=schema(index)) if guided else None, **sampling,
                )
                for index in range(count)
            ]  # fmt: skip
            requests = [
                LLMGenerationRequest(prompt, params=each)
                for prompt, each in zip(prompts, params, strict=True)
            ]
            handles = [llm.engine.submit(request) for request in requests]
            for handle in handles:
                handle.get()
        events = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        event["ended"] - event["began"]
        for event in events
        if event.get("event") == "step"
        and len(event["batch"]["decodes"]) == count
        and not event["batch"]["prefills"]
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--residents", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=1.0)
    arguments = parser.parse_args()
    sampling = {"temperature": arguments.temperature, "top_p": arguments.top_p}
    watch = Stopwatch()
    for name in ("masks", "accept"):
        setattr(GuidedState, name, watch.around(getattr(GuidedState, name)))
    batches.compute_together = watch.around(batches.compute_together)
    executor.settle = watch.around(executor.settle)
    print("| at once | plain step, ms | guided step, ms | guide, us a sequence | share of a step |")
    print("| --- | --- | --- | --- | --- |")
    with LLM(arguments.model, threads=arguments.threads, max_batch_size=32) as llm:
        for count in arguments.residents:
            taken: dict[bool, list[float]] = {False: [], True: []}
            watched: list[float] = []
            for number in range(arguments.rounds + 1):
                for guided in taken:
                    watch.seconds = 0.0
                    one = steps(
                        llm, count, arguments.tokens, guided=guided, seed=number, **sampling
                    )
                    if number:  # the first round compiles grammars
                        taken[guided] += one
                        if guided:
                            watched.append(watch.seconds / arguments.tokens)
            plain, held = (1e3 * statistics.median(taken[guided]) for guided in (False, True))
            masks = 1e3 * statistics.median(watched)
            print(
                f"| {count} | {plain:.2f} | {held:.2f} | {masks * 1e3 / count:.0f} |"
                f" {masks / held:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
