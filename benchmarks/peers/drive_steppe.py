"""Steppe under the common protocol: ``python drive_steppe.py MODEL --threads 2``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from workloads import serve

from steppe import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable


class Steppe:
    """The engine, called as a library."""

    def __init__(self, model: str, backend: str, threads: int) -> None:
        self._llm = LLM(model, backend=backend, threads=threads, max_batch_size=32)

    def one(self, ids: list[int], output: int, first: Callable[[], None]) -> None:
        """One request, streamed."""
        got = 0
        for chunk in self._llm.stream(ids, self._greedy(output)):
            if not got:
                first()
            got += len(chunk.token_ids)
        assert got == output

    def many(self, batch: list[list[int]], output: int) -> None:
        """All requests in flight together."""
        answers = self._llm.generate(batch, self._greedy(output))
        assert all(len(answer.token_ids) == output for answer in answers)

    @staticmethod
    def _greedy(output: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)


def main() -> None:
    """Load and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(Steppe(arguments.model, arguments.backend, arguments.threads))


if __name__ == "__main__":
    main()
