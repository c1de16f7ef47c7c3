"""OpenVINO GenAI under the common protocol: its continuous batching pipeline.

    python -m venv peers && peers/bin/pip install openvino-genai
    peers/bin/python benchmarks/peers/drive_openvino.py MODEL_DIR --threads 2

The directory comes from an environment with ``optimum-intel[openvino,nncf]``:

    optimum-cli export openvino -m HF_DIR --task text-generation-with-past \\
        --weight-format int4 --group-size 64 MODEL_DIR

(64, since the rows of SmolLM2's matrices do not divide by the default of 128, and such matrices
would be left in 8 bits.)
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np
import openvino
import openvino_genai
from workloads import serve

if TYPE_CHECKING:
    from collections.abc import Callable


class OpenVino:
    """One pipeline with room for all sequences, without a prefix cache."""

    def __init__(self, path: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 4096
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._requests = 0

    def one(self, ids: list[int], output: int, first: Callable[[], None]) -> None:
        """One sequence."""
        self._answer([ids], output, first)

    def many(self, batch: list[list[int]], output: int) -> None:
        """Sequences that decode together."""
        self._answer(batch, output, lambda: None)

    def _answer(self, prompts: list[list[int]], output: int, first: Callable[[], None]) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output
        config.ignore_eos = True
        config.do_sample = False
        handles = []
        for ids in prompts:
            self._requests += 1
            tensor = openvino.Tensor(np.array([ids], np.int64))
            handles.append(self._pipeline.add_request(self._requests, tensor, config))
        told = False
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            if not told and handles[0].can_read():
                told = True
                first()
        for handle in handles:
            (answer,) = handle.read_all()
            assert len(answer.generated_ids) == output, len(answer.generated_ids)


def main() -> None:
    """Load and serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(OpenVino(arguments.model, arguments.threads))


if __name__ == "__main__":
    main()
