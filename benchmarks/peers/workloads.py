"""Token-id workloads and the line protocol that every driver speaks. Standard library only.

A driver reads one JSON object per line from standard input and answers with one per line:

    {"case": "one", "prompt": 128, "output": 128, "seed": 7}      -> {"first": s, "total": s}
    {"case": "many", "count": 8, "prompt": 128, "output": 128, ...} -> {"total": s}
    {"case": "prefill", "prompt": 1024, "seed": 7}                -> {"total": s}

Prompts are random ids from the middle of the vocabulary, never the same twice, so that no prefix
cache helps and every system sees the same number of tokens. Answers are greedy and of full length.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

LOWEST_ID, HIGHEST_ID = 300, 40000


def prompt(length: int, seed: int) -> list[int]:
    """``length`` ids that no other seed gives."""
    draw = random.Random(seed * 1_000_003 + length)
    return [draw.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(length)]


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """``count`` different prompts."""
    return [prompt(length, seed * 10_007 + count * 1_009 + index) for index in range(count)]


class System(Protocol):
    """What a driver wraps."""

    def one(self, ids: list[int], output: int, first: Callable[[], None]) -> None:
        """Answer one prompt with ``output`` tokens; call ``first`` when the first is there."""

    def many(self, batch: list[list[int]], output: int) -> None:
        """Answer all prompts at once with ``output`` tokens each."""


def serve(system: System) -> None:
    """Run cases until standard input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(system, json.loads(line))), flush=True)


def _run(system: System, job: dict[str, Any]) -> dict[str, float]:
    seed, length = job["seed"], job["prompt"]
    times: list[float] = []
    if job["case"] == "many":
        batch = prompts(job["count"], length, seed)
        start = time.perf_counter()
        system.many(batch, job["output"])
        return {"total": time.perf_counter() - start}
    ids = prompt(length, seed)
    output = 1 if job["case"] == "prefill" else job["output"]
    start = time.perf_counter()
    system.one(ids, output, lambda: times.append(time.perf_counter()))
    end = time.perf_counter()
    return {"first": times[0] - start, "total": end - start}
