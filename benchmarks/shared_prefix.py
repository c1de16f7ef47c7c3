"""Workload W5: sixteen requests at once that share a prompt's first 1,024 tokens.

    python benchmarks/shared_prefix.py [--rounds N] [--vllm PYTHON HF_DIR]
        [--llama-server PROGRAM GGUF]

Prints one table of seconds from the first submit to the last token: *unseen* is the first time that
a prefix comes, *seen* the second, with other endings. Every round has a new prefix, and runs with
the cache on and off by turns. The answers of both are compared. Peers run after that, in the same
session, each in its own process with its prefix cache on: vLLM in process, llama-server over HTTP.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

from steppe import LLM, LLMGenerationRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REQUESTS = 16
PREFIX = 1024
TAIL = 32
ANSWER = 16
LOWEST, HIGHEST = 300, 40_000
"""Plain tokens of the model's vocabulary."""

VLLM = """
import json, os, sys
os.environ.update(VLLM_CPU_KVCACHE_SPACE="4", VLLM_CPU_OMP_THREADS_BIND="0-1", HF_HUB_OFFLINE="1")
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="bfloat16", max_model_len=4096, max_num_seqs=32,
          max_num_batched_tokens=4096, enable_prefix_caching=True, disable_log_stats=True)
print("ready", file=out, flush=True)
for line in sys.stdin:
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)]
    answer = SamplingParams(temperature=0, max_tokens=int(sys.argv[2]), ignore_eos=True)
    llm.generate(prompts, answer, use_tqdm=False)
    print("done", file=out, flush=True)
"""


def prompts(prefix: list[int], rng: random.Random) -> list[list[int]]:
    """Sixteen prompts with that prefix and endings of their own."""
    return [
        [*prefix, *(rng.randrange(LOWEST, HIGHEST) for _ in range(TAIL))] for _ in range(REQUESTS)
    ]


def steppe_answers(llm: LLM, batch: list[list[int]]) -> list[tuple[int, ...]]:
    """Every answer's tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    handles = [llm.engine.submit(LLMGenerationRequest(ids, params=params)) for ids in batch]
    return [handle.get().token_ids for handle in handles]


@contextmanager
def vllm(python: str, model: str) -> Iterator[Callable[[list[list[int]]], object]]:
    """vLLM in a process of its own."""
    process = subprocess.Popen(
        [python, "-c", VLLM, model, str(ANSWER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    pipe, said = process.stdin, process.stdout

    def ask(batch: list[list[int]]) -> None:
        pipe.write(json.dumps(batch) + "\n")
        pipe.flush()
        if said.readline() != "done\n":
            raise SystemExit("vLLM ended")

    try:
        if said.readline() != "ready\n":
            raise SystemExit("vLLM did not start")
        yield ask
    finally:
        # Killed by a signal, it can leave the processes that compute for it behind.
        pipe.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()


@contextmanager
def llama_server(program: str, model: str) -> Iterator[Callable[[list[list[int]]], object]]:
    """llama-server with four slots, the fastest of what was tried."""
    port = 18_431
    process = subprocess.Popen(
        [program, "-m", model, "--port", str(port), "-t", "2", "-np", "4", "-c", "8192"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"

    def one(ids: list[int]) -> None:
        body = {"prompt": ids, "n_predict": ANSWER, "temperature": 0, "ignore_eos": True}
        body["cache_prompt"] = True
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/completion", data, headers)
        urllib.request.urlopen(request, timeout=120).read()

    def ask(batch: list[list[int]]) -> None:
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as threads:
            list(threads.map(one, batch))

    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).read()
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit("llama-server ended") from None
                time.sleep(0.1)
        yield ask
    finally:
        process.terminate()
        process.wait()


def timed(ask: Callable[[list[list[int]]], object], batch: list[list[int]]) -> float:
    """Seconds until all are answered."""
    began = time.perf_counter()
    ask(batch)
    return time.perf_counter() - began


def measured(
    llm: LLM, pair: tuple[list[list[int]], list[list[int]]]
) -> tuple[tuple[float, float], list[object]]:
    """Seconds for a prefix that was not seen and for one that was, and what was said."""
    said: list[object] = []
    unseen, seen = (timed(lambda batch: said.append(steppe_answers(llm, batch)), b) for b in pair)
    return (unseen, seen), said


def row(name: str, times: list[tuple[float, float]]) -> str:
    """One line of the table: medians with their range."""
    cells = [
        f"{statistics.median(column):.2f} [{min(column):.2f}-{max(column):.2f}]"
        for column in zip(*times, strict=True)
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--off-rounds", type=int, default=1, help="rounds with the cache off, too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm", nargs=2, metavar=("PYTHON", "HF_DIR"))
    parser.add_argument("--llama-server", nargs=2, metavar=("PROGRAM", "GGUF"))
    arguments = parser.parse_args()
    rng = random.Random(os.getpid())
    rounds = []
    for _ in range(arguments.rounds + 1):
        prefix = [rng.randrange(LOWEST, HIGHEST) for _ in range(PREFIX)]
        rounds.append((prompts(prefix, rng), prompts(prefix, rng)))
    print(f"{REQUESTS} requests, {PREFIX} shared and {TAIL} own tokens, {ANSWER} to generate\n")
    print("| seconds | unseen | seen |\n| --- | --- | --- |", flush=True)
    on, off = (
        LLM(arguments.model, threads=arguments.threads, context_cache=cache)
        for cache in (True, False)
    )

    times: dict[str, list[tuple[float, float]]] = {"Steppe": [], "Steppe, cache off": []}
    for number, pair in enumerate(rounds):
        said = []
        for name, llm in zip(times, (on, off), strict=True):
            if llm is off and number > arguments.off_rounds:
                continue
            seconds, answers = measured(llm, pair)
            said.append(answers)
            if number:  # the first round warms up
                times[name].append(seconds)
        if any(other != said[0] for other in said):
            sys.exit("the cache changed an answer")
    on.close()
    off.close()
    for name, pairs in times.items():
        if pairs:
            print(row(name, pairs), flush=True)
    peers = (("vLLM", vllm, arguments.vllm), ("llama-server", llama_server, arguments.llama_server))
    for name, peer, where in peers:
        if where is None:
            continue
        with peer(*where) as ask:
            pairs = [(timed(ask, unseen), timed(ask, seen)) for unseen, seen in rounds]
        print(row(name, pairs[1:]), flush=True)


if __name__ == "__main__":
    main()
