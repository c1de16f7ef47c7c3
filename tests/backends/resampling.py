"""What must hold of ``Backend.resample``, whatever the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from steppe.backends.base import SampleBatch
from tests.backends.programs import sample_rows

if TYPE_CHECKING:
    from steppe.backends.base import Backend, StepInput

__all__ = ["check_resampling"]


def check_resampling(
    backend: Backend, step: StepInput, rng: np.random.Generator, picked: int
) -> None:
    """Some rows of a step sampled again, by random rules, are what the step gives under them.

    ``step`` has a row of logits for each row that the backend keeps, over at most 61 tokens.
    """
    count = backend.kept_rows
    backend.launch(step, SampleBatch(sample_rows(count))).wait()
    which = rng.permutation(count)[:picked].astype(np.int32)
    rows = sample_rows(
        count,
        temperature=rng.choice([0.0, 1.0], count),
        seed=rng.integers(0, 2**63, count),
        num_logprobs=rng.integers(-1, 4, count),
    )
    masks = rng.integers(1, 2**29, (count, 2), dtype=np.uint32)
    again = backend.resample(which, SampleBatch(rows[which], masks=list(masks[which])))
    for _ in range(2):  # sampling changed nothing, and nor does another step
        expected = backend.launch(step, SampleBatch(rows, masks=list(masks))).wait()
        for name in ("sampled", "logprob", "top_ids", "top_logprobs"):
            every, some = getattr(expected, name), getattr(again, name)
            np.testing.assert_array_equal(every[which][..., : some.shape[-1]], some)
    bare = backend.resample(which[:2], SampleBatch(sample_rows(2)))
    assert bare.sampled.shape == (2,)
    assert bare.logprob is None
