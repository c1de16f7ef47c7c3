"""Tokens that are sampled first, and shown to their grammar afterwards.

Where the highest logit is taken, a mask can only do one thing to it: forbid it. Such a row is
sampled as if it were free. The grammar then looks at one token, which costs a small part of what a
mask does, and only where it refuses is the mask computed and the row sampled again. So is a row
that is drawn from all tokens: its rule is to be drawn without the mask first (``sampling_rules``).

Rows with filters have their masks first. What top_k, top_p and min_p leave of all tokens is not
what they leave of those that a grammar allows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from steppe.backends.base import DrawPurpose, SampleBatch
from steppe.runtime.guided.state import GuidedState, compute_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.backends.base import Backend, StepOutput
    from steppe.runtime.executor import SequenceRows

__all__ = ["asked_later", "settle"]


def asked_later(part: SequenceRows, num_rows: int, kept_rows: int) -> GuidedState | None:
    """The grammar of a part whose one row is sampled before the grammar is asked, in a step of
    ``num_rows`` rows of logits; None for any other part.
    """
    guided = part.sequence.guided
    if guided is None or guided.error is not None or num_rows > kept_rows:
        return None
    drafts = part.decode is not None and part.sampled != (0,)
    if len(part.sampled) != 1 or drafts:
        return None
    sampler = part.sequence.sampler
    if sampler.takes_highest:
        return guided
    # What ``min_tokens`` bans may be all that a grammar allows, and then it wins, already for the
    # free draw; whether it is can be said with the mask alone.
    return guided if sampler.draws_from_all and sampler.banned is None else None


def settle(
    backend: Backend, parts: Sequence[SequenceRows], sample: SampleBatch, output: StepOutput
) -> StepOutput:
    """The output of the step that has just run, in which every refused token has become the one
    that its grammar's mask leaves. Actor thread only. Raises ExecutionError when the backend fails.
    """
    refused: list[tuple[int, SequenceRows, GuidedState]] = []
    found: list[tuple[int, int]] = []
    drawn = output.sampled.tolist()
    end = 0
    for part in parts:
        end += len(part.scored) + len(part.sampled)
        guided = asked_later(part, sample.rows.size, backend.kept_rows)
        if guided is None or guided.allows(drawn[end - 1]):
            continue
        # One token alone needs no draw, unless something is to be said about it.
        quiet = part.sequence.sampler.plain and part.sequence.logprobs is None
        only = guided.only() if quiet else None
        if only is None:
            refused.append((end - 1, part, guided))
        else:
            found.append((end - 1, only))
    if not refused and not found:
        return output
    sampled = output.sampled.copy()
    for row, token_id in found:
        sampled[row] = token_id
    logprob = output.logprob
    if refused:
        again = _drawn_again(backend, refused, sample)
        rows = [row for row, _, _ in refused]
        sampled[rows] = again.sampled
        if logprob is not None and again.logprob is not None:
            logprob = logprob.copy()
            logprob[rows] = again.logprob
    return replace(output, sampled=sampled, logprob=logprob)


def _drawn_again(
    backend: Backend,
    refused: Sequence[tuple[int, SequenceRows, GuidedState]],
    sample: SampleBatch,
) -> StepOutput:
    """What the masks of refused rows leave of them, in their order."""
    compute_together([guided for _, _, guided in refused])
    masks = [guided.masks()[0] for _, _, guided in refused]
    samplers = [part.sequence.sampler for _, part, _ in refused]
    rows = np.array([row for row, _, _ in refused], np.int32)
    once_more = sample.rows[rows]
    once_more["purpose"] = DrawPurpose.MASKED
    return backend.resample(
        rows,
        SampleBatch(
            once_more,
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
