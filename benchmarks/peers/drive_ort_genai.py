"""ONNX Runtime GenAI under the common protocol. Batches are static: all begin and end together.

    python -m venv peers && peers/bin/pip install onnxruntime-genai onnxruntime
    peers/bin/python benchmarks/peers/drive_ort_genai.py MODEL_DIR --threads 2

The directory comes from the library's own converter:

    python -m onnxruntime_genai.models.builder -i HF_DIR -o MODEL_DIR -p int4 -e cpu
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime_genai
from workloads import serve

if TYPE_CHECKING:
    from collections.abc import Callable


class OrtGenAi:
    """A model; each batch is a generator of its own."""

    def __init__(self, path: str, threads: int) -> None:
        config = onnxruntime_genai.Config(path)
        # Otherwise it computes on one thread, whatever the machine has.
        options = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self._model = onnxruntime_genai.Model(config)

    def one(self, ids: list[int], output: int, first: Callable[[], None]) -> None:
        """One sequence."""
        self._answer([ids], output, first)

    def many(self, batch: list[list[int]], output: int) -> None:
        """Sequences of one static batch."""
        self._answer(batch, output, lambda: None)

    def _answer(self, prompts: list[list[int]], output: int, first: Callable[[], None]) -> None:
        params = onnxruntime_genai.GeneratorParams(self._model)
        whole = len(prompts[0]) + output
        params.set_search_options(
            max_length=whole, min_length=whole, batch_size=len(prompts), do_sample=False
        )
        generator = onnxruntime_genai.Generator(self._model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        first()
        for _ in range(output - 1):
            generator.generate_next_token()
        assert len(generator.get_sequence(0)) == whole


def main() -> None:
    """Load and serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(OrtGenAi(arguments.model, arguments.threads))


if __name__ == "__main__":
    main()
