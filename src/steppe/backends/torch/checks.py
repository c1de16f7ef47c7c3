"""Is a step what the contract says? Cheap checks, before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from steppe.errors import ExecutionError

if TYPE_CHECKING:
    from steppe.backends.base import SampleBatch, StepInput

__all__ = ["check_samples", "check_step"]


def check_step(
    step: StepInput,
    sample: SampleBatch,
    *,
    vocab: int,
    max_positions: int,
    page_size: int,
    num_pages: tuple[int, ...],
) -> None:
    """Raise ExecutionError naming the field that does not fit the others or the cache."""
    tokens, rows = step.token_ids.size, step.logit_rows.size
    starts, contexts = step.query_start, step.context_len
    _demand(tokens > 0, "token_ids is empty")
    _demand(step.positions.size == tokens, "positions and token_ids differ in length")
    _demand(_within(step.token_ids, vocab), "token_ids outside the vocabulary")
    _demand(_within(step.positions, max_positions), f"positions outside [0, {max_positions})")
    _demand(starts.size == contexts.size + 1, "query_start and context_len differ in length")
    lengths = np.diff(starts)
    _demand(
        int(starts[0]) == 0 and int(starts[-1]) == tokens and bool((lengths >= 0).all()),
        "query_start does not cumulate the query lengths",
    )
    _demand(bool((contexts >= lengths).all()), "context_len is shorter than the query")
    _demand(
        len(step.block_tables) == len(step.slot_mappings) == len(num_pages),
        f"the program has {len(num_pages)} cache groups",
    )
    pages = -(-contexts // page_size)
    most = int(pages.max(initial=0))
    for group, (table, slots) in enumerate(zip(step.block_tables, step.slot_mappings, strict=True)):
        _demand(
            table.ndim == 2 and table.shape[0] == contexts.size and table.shape[1] >= most,
            f"block_tables[{group}] is too short for the contexts",
        )
        _demand(slots.size == tokens, f"slot_mappings[{group}] has not one slot for each token")
        _demand(
            _within(slots, num_pages[group] * page_size),
            f"slot_mappings[{group}] outside the cache",
        )
        _demand(
            int(table.max(initial=-1)) < num_pages[group],
            f"block_tables[{group}] outside the cache",
        )
        newest = table[np.arange(contexts.size), np.maximum(pages - 1, 0)]
        _demand(
            bool((newest[lengths > 0] >= 0).all()),
            f"block_tables[{group}] lacks the page of a sequence's last token",
        )
    _demand(_within(step.logit_rows, tokens), "logit_rows outside the step's tokens")
    if step.hidden_rows is not None:
        _demand(_within(step.hidden_rows, tokens), "hidden_rows outside the step's tokens")
    check_samples(sample, rows, vocab)


def check_samples(sample: SampleBatch, rows: int, vocab: int) -> None:
    """Whether a batch fits that many rows of logits. Raises ExecutionError."""
    _demand(sample.rows.size == rows, f"{sample.rows.size} sample rows for {rows} logit rows")
    if rows:
        _demand(bool((sample.rows["target"] < vocab).all()), "target outside the vocabulary")
    for name in ("bias", "history", "banned", "masks"):
        entries = getattr(sample, name)
        _demand(entries is None or len(entries) == rows, f"{name} has not one entry for each row")


def _within(values: np.ndarray[tuple[int, ...], np.dtype[np.integer]], end: int) -> bool:
    return values.size == 0 or (int(values.min()) >= 0 and int(values.max()) < end)


def _demand(true: bool, otherwise: str) -> None:
    if not true:
        raise ExecutionError(f"malformed step: {otherwise}")
