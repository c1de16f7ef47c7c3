"""llama.cpp under the common protocol, through the C interface that llama-cpp-python ships.

Run it with the python of an environment that has llama-cpp-python, which is not this project's:

    python -m venv peers && peers/bin/pip install llama-cpp-python
    peers/bin/python benchmarks/peers/drive_llama_cpp.py FILE.gguf --threads 2

Several prompts are several sequences of one context. Prompts go in by batches of up to 2048 tokens,
then every sequence decodes one token a call, the likeliest.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np
from workloads import serve

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 2048


class LlamaCpp:
    """One context with room for 32 sequences of 512 tokens, or one of 4096."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        assert self._model, f"{path} did not load"
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 32 * 512
        params.n_batch = BATCH
        params.n_ubatch = 512
        params.n_seq_max = 32
        params.n_threads = params.n_threads_batch = threads
        if hasattr(params, "kv_unified"):
            params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, "no context"
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def one(self, ids: list[int], output: int, first: Callable[[], None]) -> None:
        """One sequence."""
        self._answer([ids], output, first)

    def many(self, batch: list[list[int]], output: int) -> None:
        """Sequences that decode together."""
        self._answer(batch, output, lambda: None)

    def _answer(self, prompts: list[list[int]], output: int, first: Callable[[], None]) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        last: list[int] = [0] * len(prompts)
        todo = [
            (token, position, number, position == len(ids) - 1)
            for number, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        for start in range(0, len(todo), BATCH):
            self._decode(todo[start : start + BATCH], last)
        first()
        for step in range(output - 1):
            entries = [
                (last[number], len(ids) + step, number, True) for number, ids in enumerate(prompts)
            ]
            self._decode(entries, last)

    def _decode(self, entries: list[tuple[int, int, int, bool]], last: list[int]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for row, (token, position, number, wanted) in enumerate(entries):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = number
            batch.logits[row] = wanted
        assert llama_cpp.llama_decode(self._context, batch) == 0
        for row, (_, _, number, wanted) in enumerate(entries):
            if wanted:
                logits = llama_cpp.llama_get_logits_ith(self._context, row)
                last[number] = int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


def main() -> None:
    """Load and serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(LlamaCpp(arguments.model, arguments.threads))


if __name__ == "__main__":
    main()
