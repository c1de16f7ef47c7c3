"""``python -m tests.server.served ...`` is ``steppe serve ...`` over a slow fake backend."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import steppe.llm
from steppe.cli import main
from tests.runtime.fakes import FakeBackend

if TYPE_CHECKING:
    from steppe.backends.base import SampleBatch, StepInput
    from tests.runtime.fakes import FakeTicket

STEP_SECONDS = 0.02


class SlowBackend(FakeBackend):
    """Takes its time, so that a signal finds a request under way."""

    def launch(self, step: StepInput, sample: SampleBatch) -> FakeTicket:
        time.sleep(STEP_SECONDS)
        return super().launch(step, sample)


if __name__ == "__main__":
    steppe.llm.create_backend = lambda *_, **__: SlowBackend()  # type: ignore[assignment]
    sys.exit(main(["serve", *sys.argv[1:]]))
