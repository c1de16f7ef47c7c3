"""The rules of ``steppe.backends.sampling_rules`` over many rows of logits on a device.

A row's results do not depend on the rows beside it. They are the rules' tokens in other ways:
greedy rows are never sorted, and rows with filters sort no more of the vocabulary than they need.
Both compute in float64 from the temperature on, so a token can differ from the numpy statement's
only where two roundings of one sum fall on different sides of a border (one draw in about 1e15).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from steppe.backends.base import DrawPurpose
from steppe.backends.sampling_rules import GREEDY_BELOW, allowed_tokens, draws_from_all, uniform

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from steppe.backends.base import History, SampleBatch

__all__ = ["Sampled", "sample_rows"]

# How much of a row a top_p filter sorts at first; four times as much each time it was too little.
_FIRST_LOOK = 256


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Tokens int64[n]; log probabilities float32 as in StepOutput, or None if no row asked."""

    tokens: torch.Tensor
    logprob: torch.Tensor | None
    top_ids: torch.Tensor | None
    top_logprobs: torch.Tensor | None


def sample_rows(logits: torch.Tensor, batch: SampleBatch, first: int) -> Sampled:
    """Rows ``first`` and on of ``batch``, whose raw logits are float32 [n, vocab] (unchanged)."""
    rows = batch.rows[first : first + logits.shape[0]]
    tokens = _index(rows["target"], logits.device)
    drawn = np.flatnonzero(rows["target"] < 0)
    if drawn.size:
        picked = _index(drawn, logits.device)
        scores = logits[picked]
        _edit(scores, batch, rows, first, drawn)
        tokens[picked] = _choose_allowed(scores, rows[drawn], batch, first + drawn)
    most = int(batch.rows["num_logprobs"].max(initial=-1))
    if most < 0:
        return Sampled(tokens, None, None, None)
    return _report(logits, tokens, rows["num_logprobs"], min(most, logits.shape[1]))


def _report(
    logits: torch.Tensor, tokens: torch.Tensor, asked: npt.NDArray[np.int32], most: int
) -> Sampled:
    """Log probabilities of the raw logits, for the rows that asked."""
    count, vocab = logits.shape
    logprob = logits.new_full((count,), -torch.inf)
    top_ids = tokens.new_full((count, most), -1)
    top_logprobs = logits.new_full((count, most), -torch.inf)
    asking = np.flatnonzero(asked >= 0)
    if asking.size:
        picked = _index(asking, logits.device)
        raw = logits[picked]
        every = torch.log_softmax(raw, dim=-1)
        mine = tokens[picked]
        own = every.gather(1, mine.clamp(min=0).unsqueeze(1)).squeeze(1)
        logprob[picked] = own.masked_fill(mine < 0, -torch.inf)
        wanted = np.minimum(asked[asking], vocab)
        deepest = int(wanted.max())
        if deepest:
            _, ids = _likeliest(raw, deepest)
            values = every.gather(1, ids)
            column = torch.arange(deepest, device=logits.device)
            beyond = column >= _index(wanted, logits.device).unsqueeze(1)
            top_ids[picked, :deepest] = ids.masked_fill(beyond, -1)
            top_logprobs[picked, :deepest] = values.masked_fill(beyond, -torch.inf)
    return Sampled(tokens, logprob, top_ids, top_logprobs)


def _edit(
    scores: torch.Tensor,
    batch: SampleBatch,
    rows: npt.NDArray[np.void],
    first: int,
    drawn: npt.NDArray[np.intp],
) -> None:
    """Bias, penalties and bans, in place; rows that have none are not touched."""
    for row, at in _entries(drawn, first):
        bias = batch.bias[at] if batch.bias else None
        if bias is not None:
            ids = _index(bias[0], scores.device)
            scores[row, ids] += torch.tensor(bias[1].tolist(), device=scores.device)
        history = batch.history[at] if batch.history else None
        if history is not None:
            _penalize(scores[row], history, rows[at - first])
        banned = batch.banned[at] if batch.banned else None
        if banned is not None:
            scores[row, _index(banned, scores.device)] = -torch.inf


def _penalize(scores: torch.Tensor, history: History, row: np.void) -> None:
    ids = _index(history.token_ids, scores.device)
    counts = torch.tensor(history.counts.tolist(), dtype=torch.float32, device=scores.device)
    in_output = counts > 0
    known = torch.tensor(history.in_prompt.tolist(), dtype=torch.bool, device=scores.device)
    repetition = float(row["repetition_penalty"])
    seen = scores[ids]
    repeated = torch.where(seen > 0, seen / repetition, seen * repetition)
    values = torch.where(known | in_output, repeated, seen)
    values = values - counts * float(row["frequency_penalty"])
    scores[ids] = values - in_output.float() * float(row["presence_penalty"])


def _choose_allowed(
    scores: torch.Tensor,
    rows: npt.NDArray[np.void],
    batch: SampleBatch,
    at: npt.NDArray[np.intp],
) -> torch.Tensor:
    """``_choose`` among what masks allow; ``at`` are the rows' places in the batch. ``scores`` that
    have a mask are changed.
    """
    vocab = scores.shape[1]
    masks = [batch.masks[place] if batch.masks else None for place in at]
    masked = np.flatnonzero([mask is not None for mask in masks])
    if not masked.size:
        return _choose(scores, rows)
    allowed = {
        row: torch.from_numpy(allowed_tokens(mask, vocab)).to(scores.device)
        for row, mask in enumerate(masks)
        if mask is not None
    }
    # Those without filters are drawn as if they had no mask, and again if that is forbidden.
    rows = rows.copy()
    twice = masked[draws_from_all(rows[masked], vocab)]
    twice = twice[rows["purpose"][twice] != DrawPurpose.MASKED]
    first = dict(zip(twice.tolist(), _free(scores, rows, twice), strict=True))
    rows["purpose"][twice] = DrawPurpose.MASKED
    for row, mask in allowed.items():
        scores[row].masked_fill_(~mask, -torch.inf)
    tokens = _choose(scores, rows)
    for row, token in first.items():
        if token >= 0 and allowed[row][token]:
            tokens[row] = token
    return tokens


def _free(
    scores: torch.Tensor, rows: npt.NDArray[np.void], some: npt.NDArray[np.intp]
) -> list[int]:
    if not some.size:
        return []
    found: list[int] = _choose(scores[_index(some, scores.device)], rows[some]).tolist()
    return found


def _choose(scores: torch.Tensor, rows: npt.NDArray[np.void]) -> torch.Tensor:
    """Token ids int64[n] of edited logits [n, vocab]; -1 where nothing can be chosen."""
    tokens = scores.argmax(dim=-1)
    tokens = tokens.masked_fill(~torch.isfinite(scores.amax(dim=-1)), -1)
    warm = rows["temperature"] >= GREEDY_BELOW
    if not warm.any():
        return tokens
    warm &= (tokens >= 0).cpu().numpy()
    vocab = scores.shape[1]
    u = uniform(rows["seed"], rows["sequence_index"], rows["position"], rows["purpose"])
    cut_k = (rows["top_k"] > 0) & (rows["top_k"] < vocab)
    cut_p = rows["top_p"] < 1.0
    for group, draw in (
        (warm & ~cut_k & ~cut_p, _draw_from_all),
        (warm & cut_k, _draw_from_top_k),
        (warm & ~cut_k & cut_p, _draw_from_top_p),
    ):
        members = np.flatnonzero(group)
        if members.size:
            picked = _index(members, scores.device)
            theirs = rows[members]
            hot = scores[picked].double() / _column(theirs["temperature"], scores.device)
            tokens[picked] = draw(hot, theirs, _column(u[members], scores.device))
    return tokens


def _draw_from_all(
    scores: torch.Tensor, rows: npt.NDArray[np.void], u: torch.Tensor
) -> torch.Tensor:
    """Rows without top_k and top_p: nothing is sorted."""
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp_()
    weights.masked_fill_(weights < _column(rows["min_p"], scores.device), 0.0)
    return _invert(weights, u)


def _draw_from_top_k(
    scores: torch.Tensor, rows: npt.NDArray[np.void], u: torch.Tensor
) -> torch.Tensor:
    """Rows with top_k, and perhaps top_p: the k best are sorted."""
    values, ids = _likeliest(scores, int(rows["top_k"].max()))
    weights = (values - values[:, :1]).exp_()
    column = torch.arange(values.shape[1], device=scores.device)
    weights.masked_fill_(column >= _index(rows["top_k"], scores.device).unsqueeze(1), 0.0)
    return _finish(weights, ids, weights.cumsum(dim=-1), None, rows, u)


def _draw_from_top_p(
    scores: torch.Tensor, rows: npt.NDArray[np.void], u: torch.Tensor
) -> torch.Tensor:
    """Rows with top_p alone: sorted as far as the mass reaches."""
    vocab = scores.shape[1]
    # A cumulative sum, since a plain one may be split among threads when there are few rows.
    whole = (scores - scores.amax(dim=-1, keepdim=True)).exp_().cumsum(dim=-1)[:, -1:]
    limit = _column(rows["top_p"], scores.device) * whole
    look = min(_FIRST_LOOK, vocab)
    while True:
        values, ids = _likeliest(scores, look)
        weights = (values - values[:, :1]).exp_()
        mass = weights.cumsum(dim=-1)
        if look == vocab or bool((mass[:, -1:] >= limit).all()):
            return _finish(weights, ids, mass, whole, rows, u)
        look = min(4 * look, vocab)


def _finish(
    weights: torch.Tensor,
    ids: torch.Tensor,
    mass: torch.Tensor,
    whole: torch.Tensor | None,
    rows: npt.NDArray[np.void],
    u: torch.Tensor,
) -> torch.Tensor:
    """top_p and min_p over sorted weights [n, m] with cumulative ``mass``, then the draw."""
    top_p = _column(rows["top_p"], weights.device)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    out = (before >= top_p * (mass[:, -1:] if whole is None else whole)) & (top_p < 1.0)
    out |= weights < _column(rows["min_p"], weights.device)
    out[:, 0] = False
    weights = weights.masked_fill(out, 0.0)
    order = ids.argsort(dim=-1)
    return ids.gather(1, order).gather(1, _invert(weights.gather(1, order), u).unsqueeze(1))[:, 0]


def _invert(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first column whose cumulative weight exceeds u [n, 1] times the whole, the last with any
    weight where rounding leaves none.
    """
    mass = weights.cumsum(dim=-1)
    total = mass[:, -1:].clone()
    found = torch.searchsorted(mass, u * total, right=True)
    return torch.minimum(found, torch.searchsorted(mass, total)).squeeze(1)


def _likeliest(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest of each row with their ids, falling, equals by rising id."""
    values, ids = scores.topk(k, dim=-1)
    border = values[:, -1:]
    # Which of several equals at the border topk took is its own affair: take the lowest ids.
    tied = (scores == border).sum(dim=-1) > (values == border).sum(dim=-1)
    for row in torch.nonzero(tied & torch.isfinite(border[:, 0]))[:, 0].tolist():
        inside = ids[row][values[row] > border[row]]
        equal = torch.nonzero(scores[row] == border[row])[:, 0]
        ids[row] = torch.cat((inside, equal[: k - inside.numel()]))
    ids = ids.sort(dim=-1).values
    values = scores.gather(1, ids)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _entries(drawn: npt.NDArray[np.intp], first: int) -> Iterator[tuple[int, int]]:
    """(row of the drawn rows, row of the batch)."""
    return ((row, first + int(at)) for row, at in enumerate(drawn))


def _index(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """int64 on the device, always a copy (the caller's array may be read-only)."""
    return torch.from_numpy(np.array(array, dtype=np.int64)).to(device)


def _column(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """float64 [n, 1] on the device."""
    return torch.from_numpy(np.array(array, dtype=np.float64)).to(device).unsqueeze(1)
