"""How logits become a token: each rule, stated once, in numpy.

This module is the reference that every backend's sampler is tested against; a backend may compute
in another order, but its tokens must be these. The rules, in the order in which ``sample_rows``
applies them to a row:

1. Log probabilities are ``log_softmax`` of the raw logits: before bias, penalties and filters.
2. ``apply_bias``: add a value to the logits of some tokens.
3. ``apply_penalties``: the repetition penalty over everything seen (a logit above zero is divided
   by it, another multiplied), then the frequency penalty times the output count and the presence
   penalty of every token in the output, both subtracted.
4. ``apply_bans``: tokens that must not be sampled now become -inf.
5. ``apply_mask``: so do those that a grammar forbids.
6. Temperature under ``GREEDY_BELOW``: the highest logit wins, the lowest id among equals. Else the
   logits are divided by it, in float64 from here on.
7. ``filter_top_k``: the k highest stay, the lowest ids among equals at the border.
8. ``filter_top_p``: over what stayed, renormalised and taken falling (equals by rising id), a token
   stays while the mass before it is below ``top_p``. The first always stays.
9. ``filter_min_p``: a token stays if its probability is at least ``min_p`` times the highest.
10. ``draw``: what stayed, in rising id order, is drawn by inverting its cumulative sum at a number
    that ``uniform`` derives from (seed, sequence index, position, purpose) and nothing else.
11. A row with a mask and without filters (``draws_from_all``) is first drawn as if it had no mask.
    Only where that is forbidden is it drawn under the mask, with the number of ``MASKED``: together
    that draws each allowed token as often as one draw under the mask would. So whoever has a
    grammar may sample first, and compute a mask only for a token that is refused: a row of purpose
    ``MASKED`` is one that has been refused.

A row that leaves nothing to choose (everything forbidden, or a logit that is not a number) has
``sampled`` -1: the caller fails that request alone.

Pure functions; any thread. None changes its arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from steppe.backends.base import DrawPurpose, StepOutput

if TYPE_CHECKING:
    import numpy.typing as npt

    from steppe.backends.base import History, SampleBatch

__all__ = [
    "GREEDY_BELOW",
    "allowed_tokens",
    "apply_bans",
    "apply_bias",
    "apply_mask",
    "apply_penalties",
    "draw",
    "draws_from_all",
    "filter_min_p",
    "filter_top_k",
    "filter_top_p",
    "greedy",
    "likeliest",
    "logprobs",
    "philox4x32",
    "sample_rows",
    "uniform",
]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""

NOTHING = -1
"""What a row that leaves nothing to choose has sampled."""

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_LOW_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(
    counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """Ten rounds of Philox4x32: uint32[n, 4] from counters uint32[n, 4] and keys uint32[n, 2].

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    x0, x1, x2, x3 = (counter[:, i].copy() for i in range(4))
    k0, k1 = key[:, 0].copy(), key[:, 1].copy()
    for _ in range(10):
        left = x0.astype(np.uint64) * _MULTIPLIERS[0]
        right = x2.astype(np.uint64) * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            _high(right) ^ x1 ^ k0,
            _low(right),
            _high(left) ^ x3 ^ k1,
            _low(left),
        )
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return np.stack((x0, x1, x2, x3), axis=1)


def uniform(
    seed: npt.ArrayLike,
    sequence_index: npt.ArrayLike,
    position: npt.ArrayLike,
    purpose: npt.ArrayLike,
) -> npt.NDArray[np.float64]:
    """Uniform numbers float64[n] in [0, 1) of 53 random bits, one for each (seed, sequence index,
    position, purpose).

    The key is the seed's low and high word; the counter is (position low, position high, sequence
    index, purpose). The first two words of the result are the number. Arguments broadcast to [n].
    """
    columns = np.broadcast_arrays(
        np.atleast_1d(np.asarray(seed, np.uint64)),
        np.asarray(position, np.int64).astype(np.uint64),
        np.asarray(sequence_index, np.int64).astype(np.uint64),
        np.asarray(purpose, np.int64).astype(np.uint64),
    )
    seeds, positions, sequences, purposes = columns
    counter = np.stack((_low(positions), _high(positions), _low(sequences), _low(purposes)), axis=1)
    words = philox4x32(counter, np.stack((_low(seeds), _high(seeds)), axis=1)).astype(np.uint64)
    bits = (words[:, 0] << _HALF | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def logprobs(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """log_softmax over the last axis, in float64."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def likeliest(logits: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """Ids of the k highest logits of a row, falling, equals by rising id."""
    return np.argsort(-logits, kind="stable")[:k]


def apply_bias(
    logits: npt.NDArray[np.float32],
    bias: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None,
) -> npt.NDArray[np.float32]:
    """``logits[vocab]`` plus the bias of (distinct token ids, values)."""
    out = logits.copy()
    if bias is not None:
        ids, values = bias
        out[ids] += values
    return out


def apply_penalties(
    logits: npt.NDArray[np.float32],
    history: History | None,
    repetition: np.float32,
    frequency: np.float32,
    presence: np.float32,
) -> npt.NDArray[np.float32]:
    """Repetition (prompt and output), then frequency and presence (output) penalties, float32."""
    out = logits.copy()
    if history is None:
        return out
    ids, counts = history.token_ids, history.counts
    seen = out[ids]
    known = history.in_prompt | (counts > 0)
    repeated = np.where(seen > 0, seen / np.float32(repetition), seen * np.float32(repetition))
    values = np.where(known, repeated, seen)
    values = values - np.float32(frequency) * counts.astype(np.float32)
    values = values - np.float32(presence) * (counts > 0).astype(np.float32)
    out[ids] = values
    return out


def apply_bans(
    logits: npt.NDArray[np.float32], banned: npt.NDArray[np.int32] | None
) -> npt.NDArray[np.float32]:
    """-inf for every banned id."""
    out = logits.copy()
    if banned is not None:
        out[banned] = -np.inf
    return out


def allowed_tokens(mask: npt.NDArray[np.uint32], vocab: int) -> npt.NDArray[np.bool_]:
    """bool[vocab] of a packed mask: bit i % 32, lowest first, of word i // 32 allows token i."""
    words = np.ascontiguousarray(mask, dtype="<u4")
    return np.unpackbits(words.view(np.uint8), count=vocab, bitorder="little").astype(np.bool_)


def apply_mask(
    logits: npt.NDArray[np.float32], mask: npt.NDArray[np.uint32] | None
) -> npt.NDArray[np.float32]:
    """-inf for every token that a grammar's mask does not allow."""
    if mask is None:
        return logits.copy()
    return np.where(allowed_tokens(mask, logits.shape[-1]), logits, np.float32(-np.inf))


def greedy(logits: npt.NDArray[np.float32]) -> int:
    """The id of the highest logit, the lowest among equals; -1 if nothing can be chosen."""
    return int(np.argmax(logits)) if np.isfinite(logits.max()) else NOTHING


def filter_top_k(scores: npt.NDArray[np.float64], k: int) -> npt.NDArray[np.float64]:
    """The k highest scores of a row, -inf elsewhere. k 0 or at least the vocabulary: off."""
    if not 0 < k < scores.size:
        return scores
    return _only(scores, np.argsort(-scores, kind="stable")[:k])


def filter_top_p(scores: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.float64]:
    """The likeliest scores whose mass reaches ``top_p``, -inf elsewhere. 1 or more: off."""
    if top_p >= 1.0:
        return scores
    order = np.argsort(-scores, kind="stable")
    mass = np.cumsum(_weights(scores[order]))
    before = np.concatenate(([0.0], mass[:-1]))
    keep = before < top_p * mass[-1]
    keep[0] = True
    return _only(scores, order[keep])


def filter_min_p(scores: npt.NDArray[np.float64], min_p: float) -> npt.NDArray[np.float64]:
    """Scores at least ``min_p`` times as likely as the likeliest, -inf elsewhere. 0: off."""
    if min_p <= 0.0:
        return scores
    return np.where(_weights(scores) >= min_p, scores, -np.inf)


def draw(scores: npt.NDArray[np.float64], u: float) -> int:
    """The first id at which the cumulative weight exceeds ``u`` times the whole.

    Where rounding leaves no such id (u within an ulp of 1), the last one with any weight.
    """
    mass = np.cumsum(_weights(scores))
    index = int(np.searchsorted(mass, u * mass[-1], side="right"))
    return min(index, int(np.searchsorted(mass, mass[-1], side="left")))


def draws_from_all(rows: npt.NDArray[np.void], vocab: int) -> npt.NDArray[np.bool_]:
    """bool[n]: the rows that are drawn at random, and from all that is not forbidden."""
    cut = (rows["top_k"] > 0) & (rows["top_k"] < vocab)
    cut |= (rows["top_p"] < 1.0) | (rows["min_p"] > 0.0)
    return np.asarray((rows["temperature"] >= GREEDY_BELOW) & ~cut)


def sample_rows(logits: npt.NDArray[np.float32], batch: SampleBatch) -> StepOutput:
    """Every row of ``logits`` [R, vocab] by its own rules: what a backend's sampler must return.

    In the arrays over rows, a row that asked for nothing has logprob -inf.
    """
    rows = batch.rows
    u = uniform(rows["seed"], rows["sequence_index"], rows["position"], rows["purpose"])
    again = uniform(rows["seed"], rows["sequence_index"], rows["position"], DrawPurpose.MASKED)
    free = draws_from_all(rows, logits.shape[1]) & (rows["purpose"] != DrawPurpose.MASKED)
    chosen = []
    for i in range(len(rows)):
        mask = batch.masks[i] if batch.masks else None
        number = float(u[i])
        if mask is not None and free[i]:
            token = _sample(logits[i], batch, i, number, None)
            if token >= 0 and allowed_tokens(mask, logits.shape[1])[token]:
                chosen.append(token)
                continue
            number = float(again[i])
        chosen.append(_sample(logits[i], batch, i, number, mask))
    sampled = np.array(chosen, dtype=np.int32)
    most = int(rows["num_logprobs"].max(initial=-1))
    if most < 0:
        return StepOutput(sampled)
    most = min(most, logits.shape[1])
    logprob = np.full(len(rows), -np.inf, dtype=np.float32)
    top_ids = np.full((len(rows), most), -1, dtype=np.int32)
    top_logprobs = np.full((len(rows), most), -np.inf, dtype=np.float32)
    for i in np.flatnonzero(rows["num_logprobs"] >= 0).tolist():
        row = logprobs(logits[i])
        ids = likeliest(logits[i], int(rows["num_logprobs"][i]))
        top_ids[i, : ids.size] = ids
        top_logprobs[i, : ids.size] = row[ids]
        if sampled[i] >= 0:
            logprob[i] = row[sampled[i]]
    return StepOutput(sampled, logprob, top_ids, top_logprobs)


def _sample(
    logits: npt.NDArray[np.float32],
    batch: SampleBatch,
    i: int,
    u: float,
    mask: npt.NDArray[np.uint32] | None,
) -> int:
    row = batch.rows[i]
    if row["target"] >= 0:
        return int(row["target"])
    work = apply_bias(logits, batch.bias[i] if batch.bias else None)
    work = apply_penalties(
        work,
        batch.history[i] if batch.history else None,
        row["repetition_penalty"],
        row["frequency_penalty"],
        row["presence_penalty"],
    )
    work = apply_bans(work, batch.banned[i] if batch.banned else None)
    work = apply_mask(work, mask)
    best = greedy(work)
    if best == NOTHING or row["temperature"] < GREEDY_BELOW:
        return best
    scores = work.astype(np.float64) / np.float64(row["temperature"])
    scores = filter_top_k(scores, int(row["top_k"]))
    scores = filter_top_p(scores, float(row["top_p"]))
    scores = filter_min_p(scores, float(row["min_p"]))
    return draw(scores, u)


def _weights(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """exp(score - highest): 1 for the likeliest, 0 for what is out."""
    return np.asarray(np.exp(scores - scores.max()))


def _only(scores: npt.NDArray[np.float64], keep: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    out = np.full_like(scores, -np.inf)
    out[keep] = scores[keep]
    return out


def _low(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    return (words & _LOW_WORD).astype(np.uint32)


def _high(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    return (words >> _HALF).astype(np.uint32)
