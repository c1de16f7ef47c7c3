"""What each type of keys and values costs and gives: ``python benchmarks/kv_types.py``.

For each type: bytes of the cache per token, perplexity on 4,096 tokens of text (Python's own help
topics) with the change against the first type, and tokens per second of 32 sequences of 128 + 128
tokens, prompts included: medians with their range, interleaved. ``--contexts`` are more lengths of
prompts; the machine's state is printed before and after.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from native_kernels import state
from workloads import prompts

from steppe import LLM, SamplingParams
from steppe.backends.native import _native

OUTPUT = 128
MEMORY = 2**30  # less than the seats could use, so that it buys as many tokens as it can


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--types", nargs="+", default=["bfloat16", "float16", "int8"])
    parser.add_argument("--backend", default="native")
    parser.add_argument("--threads", type=int, default=_native.default_threads())
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--contexts", type=int, nargs="*", default=[128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096, help="0 measures no perplexity")
    args = parser.parse_args()
    state(_native.variants()[0], args.threads)
    options = {"backend": args.backend, "threads": args.threads, "kv_memory": MEMORY}
    systems = {kv: LLM(args.model, kv_dtype=kv, **options) for kv in args.types}
    print(f"{'type':10}{'bytes/token':>12}{'perplexity':>12}{'change':>9}", end="")
    print(*(f"{f'tokens/s at {n}':>24}" for n in args.contexts))
    costs = dict.fromkeys(args.types, 0.0)
    if args.tokens:
        costs = {kv: perplexity(llm, args.tokens) for kv, llm in systems.items()}
    speeds: dict[tuple[str, int], list[float]] = {}
    for round_ in range(args.rounds + 1):  # the first warms up
        for context in args.contexts:
            for kv, llm in systems.items():
                batch = prompts(args.sequences, context, round_)
                took = seconds(llm, batch)
                if round_:
                    speeds.setdefault((kv, context), []).append(len(batch) * OUTPUT / took)
    first = costs[args.types[0]]
    for kv, llm in systems.items():
        change = math.expm1(costs[kv] - first)
        page = MEMORY / llm.cache_tokens
        print(f"{kv:10}{page:12.0f}{math.exp(costs[kv]):12.3f}{change:9.2%}", end="")
        for context in args.contexts:
            each = speeds[kv, context]
            text = f"{statistics.median(each):.0f} [{min(each):.0f}-{max(each):.0f}]"
            print(f"{text:>24}", end="")
        print()
        llm.close()
    state(_native.variants()[0], args.threads)


def perplexity(llm: LLM, count: int) -> float:
    """Mean of -log probability of each token but the first."""
    text = "\n".join(topics[key] for key in sorted(topics))
    tokens = llm.tokenizer.encode(text[: 10 * count])[:count]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scored = llm.generate(tokens, params).outputs[0].prompt_logprobs
    assert scored is not None
    assert len(scored) == len(tokens) == count
    return -statistics.fmean(each.logprob for each in scored if each is not None)


def seconds(llm: LLM, batch: list[list[int]]) -> float:
    """Of answering all at once."""
    start = time.perf_counter()
    llm.generate(batch, SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
