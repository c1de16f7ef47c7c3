"""Tokens that are sampled first, and shown to their grammar afterwards.

Where the highest logit is taken, a mask can only do one thing to it: forbid it. Such a row is
sampled as if it were free. The grammar then looks at one token, which costs a small part of what a
mask does, and only where it refuses is the mask computed and the row sampled again. So is a row
that is drawn from all tokens: its rule is to be drawn without the mask first (``sampling_rules``).
Where the grammar leaves one text only, a refused token needs neither: its successor is known.

Rows with filters have their masks first. What top_k, top_p and min_p leave of all tokens is not
what they leave of those that a grammar allows.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from steppe.backends.base import SAMPLE_ROW, DrawPurpose, SampleBatch
from steppe.runtime.guided.state import GuidedState, compute_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.backends.base import Backend, StepOutput
    from steppe.runtime.executor import SequenceRows

__all__ = ["Asked", "asked_later", "settle"]


ROW_BYTES = SAMPLE_ROW.itemsize
OFFSETS = {name: offset for name, (_, offset, *_) in (SAMPLE_ROW.fields or {}).items()}
PURPOSE_AT = OFFSETS["purpose"]
MASKED = Struct("=i").pack(DrawPurpose.MASKED)


class Asked(NamedTuple):
    """A row of logits that is sampled before its grammar is asked."""

    row: int
    part: SequenceRows
    guided: GuidedState


def asked_later(part: SequenceRows, num_rows: int, kept_rows: int) -> bool:
    """Whether a guided part, in a step of ``num_rows`` rows of logits, has its one row sampled
    before its grammar is asked.
    """
    guided, sampler = part.sequence.guided, part.sequence.sampler
    if guided is None or guided.error is not None or num_rows > kept_rows:
        return False
    drafts = part.decode is not None and part.sampled != (0,)
    if len(part.sampled) != 1 or drafts:
        return False
    # What ``min_tokens`` bans may be all that a grammar allows, and then it wins, already for the
    # free draw; whether it is can be said with the mask alone.
    return sampler.takes_highest or (sampler.draws_from_all and sampler.banned is None)


def settle(
    backend: Backend, asked: Sequence[Asked], sample: SampleBatch, output: StepOutput
) -> StepOutput:
    """The output of the step that has just run, in which every refused token has become the one
    that its grammar's mask leaves. Actor thread only. Raises ExecutionError when the backend fails.
    """
    refused: list[Asked] = []
    found: list[tuple[int, int]] = []
    drawn = output.sampled.tolist()
    for one in asked:
        row, part, guided = one
        if guided.allows(drawn[row]):
            continue
        # One token alone needs no draw, unless something is to be said about it.
        quiet = part.sequence.sampler.plain and part.sequence.logprobs is None
        only = guided.only() if quiet else None
        if only is None:
            refused.append(one)
        else:
            found.append((row, only))
    if not refused and not found:
        return output
    logprob = output.logprob
    if refused:
        again = _drawn_again(backend, refused, sample)
        rows = [row for row, _, _ in refused]
        found += zip(rows, again.sampled.tolist(), strict=True)
        if logprob is not None and again.logprob is not None:
            logprob = logprob.copy()
            logprob[rows] = again.logprob
    sampled = output.sampled.copy()
    for row, token_id in found:
        sampled[row] = token_id
    return output.with_tokens(sampled, logprob)


def _drawn_again(backend: Backend, refused: Sequence[Asked], sample: SampleBatch) -> StepOutput:
    """What the masks of refused rows leave of them, in their order."""
    compute_together([guided for _, _, guided in refused])
    masks = [guided.masks()[0] for _, _, guided in refused]
    samplers = [part.sequence.sampler for _, part, _ in refused]
    # Written as bytes, as in ``batches``: a model's weights have just passed through the caches,
    # and every numpy operation on these few rows is slow then.
    before = bytearray(sample.rows.tobytes())
    for row, _, _ in refused:
        start = row * ROW_BYTES + PURPOSE_AT
        before[start : start + len(MASKED)] = MASKED
    chosen = [before[row * ROW_BYTES : (row + 1) * ROW_BYTES] for row, _, _ in refused]
    which = np.array([row for row, _, _ in refused], np.int32)
    again = np.frombuffer(bytearray().join(chosen), SAMPLE_ROW)
    if all(sampler.plain for sampler in samplers):
        return backend.resample(which, SampleBatch(again, masks=masks))
    return backend.resample(
        which,
        SampleBatch(
            again,
            bias=[sampler.bias for sampler in samplers],
            history=[sampler.history for sampler in samplers],
            # A grammar that is at its end wins over ``min_tokens``: nothing else could follow.
            banned=[
                None if guided.complete else sampler.banned
                for sampler, (_, _, guided) in zip(samplers, refused, strict=True)
            ],
            masks=masks,
        ),
    )
