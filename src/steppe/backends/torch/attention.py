"""Attention over the paged cache, sequence by sequence, over key blocks of fixed size and place.

A query's result depends on its own keys and nothing else, to the bit (float32 on the CPU):

* Keys are taken in blocks of ``KEY_BLOCK`` positions counted from position 0, however pages lie.
* The highest score is exact in any order. Then each block is summed by itself, and the sums are
  added in rising order; a block that is masked for a query adds exact zeros, so it makes no
  difference whether the chunk or window around the query reached into it.
* Queries share matrix products, whose rows do not influence each other (see ``ops``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from steppe.backends.torch.ops import MIN_COLUMNS, padded_rows, softcap

if TYPE_CHECKING:
    from steppe.backends.base import StepInput
    from steppe.backends.tape import CacheSpec
    from steppe.backends.torch.cache import Cached

__all__ = ["KEY_BLOCK", "GroupStep", "attend", "plan_group"]

KEY_BLOCK = 128

# Elements of the scores of one tile of queries: what bounds the memory of a long prefill.
_SCORES = 1 << 22
_MOST_QUERIES = 128


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """Queries ``first`` to ``last`` of the step; ``offset`` and ``length`` of what they see in
    their sequence's keys; ``hidden`` [queries, length] marks what a query must not see.
    """

    first: int
    last: int
    offset: int
    length: int
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """Cache slots of the keys that a sequence's queries can see, a multiple of KEY_BLOCK."""

    key_slots: torch.Tensor
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GroupStep:
    """What a step means to one cache group: where its tokens go and what its queries see."""

    slots: torch.Tensor
    sequences: tuple[_Sequence, ...]


def plan_group(
    step: StepInput,
    group: int,
    spec: CacheSpec,
    page_size: int,
    num_heads: int,
    device: torch.device,
) -> GroupStep:
    """Prepare a step for the layers of a cache group, which all see the same."""
    sequences = []
    for number, table in enumerate(step.block_tables[group]):
        first, last = int(step.query_start[number]), int(step.query_start[number + 1])
        if first == last:
            continue
        context = int(step.context_len[number])
        start = context - (last - first)
        lowest = _first_key(start, spec.window)
        # Positions nobody sees (past the end, or out of every query's window, where the page may be
        # gone) repeat the last key: masked, and finite if the sequence itself is.
        seen = np.arange(lowest, _blocks_end(context))
        seen[(seen < _oldest(start, spec.window)) | (seen >= context)] = context - 1
        key_slots = table[seen // page_size].astype(np.int64) * page_size + seen % page_size
        tiles = []
        most = _SCORES // (num_heads * key_slots.size)
        queries = max(16, min(_MOST_QUERIES, most))
        for begin in range(first, last, queries):
            end = min(begin + queries, last)
            tiles.append(_plan_tile(begin, end, start + begin - first, lowest, spec.window, device))
        sequences.append(_Sequence(torch.from_numpy(key_slots).to(device), tuple(tiles)))
    slots = torch.from_numpy(np.array(step.slot_mappings[group], np.int64)).to(device)
    return GroupStep(slots, tuple(sequences))


def attend(
    q: torch.Tensor,
    keys: Cached,
    values: Cached,
    plan: GroupStep,
    *,
    num_heads: int,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    """Attention of q [padded T, num_heads * head_dim] over a layer's keys and values: shaped as q,
    padding rows zero.
    """
    out = torch.zeros_like(q)
    for sequence in plan.sequences:
        k, v = keys.read(sequence.key_slots), values.read(sequence.key_slots)
        for tile in sequence.tiles:
            seen = slice(tile.offset, tile.offset + tile.length)
            out[tile.first : tile.last] = _attend_tile(
                q[tile.first : tile.last].float() * scale,
                k[seen].transpose(0, 1),
                v[seen].transpose(0, 1),
                tile.hidden,
                num_heads,
                cap,
            )
    return out


def _attend_tile(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    num_heads: int,
    cap: float | None,
) -> torch.Tensor:
    """q [queries, width] over keys and values [kv_heads, length, head_dim]."""
    queries = q.shape[0]
    kv_heads, length, head_dim = keys.shape
    shared = num_heads // kv_heads
    used = queries * shared
    rows = q.new_zeros(kv_heads, padded_rows(used), head_dim)
    rows[:, :used] = (
        q.view(queries, kv_heads, shared, head_dim).transpose(0, 1).reshape(kv_heads, used, -1)
    )
    scores = torch.bmm(rows, keys.transpose(1, 2))
    if cap is not None:
        scores = softcap(scores, cap)
    if hidden is not None:
        by_query = scores[:, :used].view(kv_heads, queries, shared, length)
        by_query.masked_fill_(hidden[:, None, :], -torch.inf)
    scores -= scores.amax(dim=-1, keepdim=True)
    scores.exp_()
    sums = scores.view(kv_heads, rows.shape[1], -1, KEY_BLOCK).sum(dim=-1)
    total = sums.cumsum(dim=-1)[..., -1:]
    # Rows of a product are alike from MIN_COLUMNS columns on: small heads are padded with zeros.
    columns = max(head_dim, MIN_COLUMNS)
    values = torch.nn.functional.pad(values, (0, columns - head_dim))
    mixed = rows.new_zeros(kv_heads, rows.shape[1], columns)
    for start in range(0, length, KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        mixed = torch.baddbmm(mixed, scores[:, :, block], values[:, block])
    mixed = (mixed / total)[:, :used, :head_dim]
    return mixed.reshape(kv_heads, queries, shared * head_dim).transpose(0, 1).reshape(queries, -1)


def _plan_tile(
    begin: int, end: int, position: int, lowest: int, window: int | None, device: torch.device
) -> _Tile:
    """Tokens ``begin`` to ``end``, the first of them at ``position`` of its sequence, whose
    gathered keys start at position ``lowest``.
    """
    first_key = _first_key(position, window)
    end_key = _blocks_end(position + end - begin)
    key = np.arange(first_key, end_key)[None, :]
    query = np.arange(position, position + end - begin)[:, None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    mask = torch.from_numpy(hidden).to(device) if hidden.any() else None
    return _Tile(begin, end, first_key - lowest, end_key - first_key, mask)


def _first_key(position: int, window: int | None) -> int:
    """Where the key block starts that holds the first key a query at ``position`` can see."""
    return _oldest(position, window) // KEY_BLOCK * KEY_BLOCK


def _oldest(position: int, window: int | None) -> int:
    """The first key that a query at ``position`` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _blocks_end(length: int) -> int:
    """``length`` keys rounded up to whole blocks."""
    return -(-length // KEY_BLOCK) * KEY_BLOCK
