"""From sequences to one ragged batch: the only place that builds a backend's step."""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from steppe.backends.base import SAMPLE_ROW, History, SampleBatch, StepInput
from steppe.runtime.guided.asking import Asked, asked_later
from steppe.runtime.guided.state import compute_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.runtime.executor import SequenceRows
    from steppe.runtime.guided.state import GuidedState

__all__ = ["POOLED_OUTPUT", "Batch", "BatchBuilder"]

POOLED_OUTPUT = "final_hidden"
"""The output that embeddings are made of."""


class Batch(NamedTuple):
    """A step, how its rows are sampled, and those of them whose grammars are asked afterwards."""

    step: StepInput
    sample: SampleBatch
    asked: Sequence[Asked] = ()


class BatchBuilder:
    """Builds steps, for a backend that keeps ``kept_rows`` rows of logits. Actor thread only.

    Its arrays are its own: those of one step may be changed to be the next one's, which is built
    when the one before has run. Where a step decodes one token of each sequence, and the next does
    the same for the same seatings, only what moved is written anew (``_DecodeBatch``); any other
    step is built from nothing. Which way it was built shows in no step.
    """

    def __init__(self, page_size: int, num_groups: int, kept_rows: int) -> None:
        self._page_size = page_size
        self._num_groups = num_groups
        self._kept_rows = kept_rows
        self._last: _DecodeBatch | None = None

    def build(self, parts: Sequence[SequenceRows], outputs: tuple[str, ...] = ()) -> Batch:
        """The step that runs ``parts``; see ``StepExecutor``."""
        last = self._last
        if last is not None and not outputs and last.advance(parts):
            batch, plain = last.batch, last.plain
        else:
            step = self._step(parts, outputs)
            sample = _sample_batch(parts, step.positions[0][step.logit_rows])
            sampled = [part.sequence for part in parts if part.sampled]
            batch = Batch(step, sample)
            plain = all(one.guided is None and one.sampler.plain for one in sampled)
            decodes = not outputs and all(map(_decodes_one, parts))
            self._last = _DecodeBatch(parts, batch, self._page_size, plain) if decodes else None
        if plain:
            return batch
        return Batch(batch.step, *_extras(batch.sample.rows, parts, self._kept_rows))

    def _step(self, parts: Sequence[SequenceRows], outputs: tuple[str, ...]) -> StepInput:
        lengths = np.fromiter((len(part.token_ids) for part in parts), np.int32, len(parts))
        past = np.fromiter((part.sequence.computed for part in parts), np.int32, len(parts))
        query_start = np.zeros(len(parts) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        total = int(query_start[-1])
        token_ids = np.fromiter(
            (token for part in parts for token in part.token_ids), np.int32, total
        )
        positions = np.arange(total, dtype=np.int32)
        positions += np.repeat(past - query_start[:-1], lengths)
        tables, slots = self._map_pages(parts, lengths, positions)
        logit_rows: list[int] = []
        pooled: list[int] = []
        for part, start in zip(parts, query_start.tolist(), strict=False):
            pooled.extend(start + offset for offset in part.pooled)
            logit_rows.extend(start + offset for offset in part.scored)
            logit_rows.extend(start + offset for offset in part.sampled)
        return StepInput(
            token_ids=token_ids,
            positions=positions.reshape(1, total),
            query_start=query_start,
            context_len=past + lengths,
            block_tables=tables,
            slot_mappings=slots,
            logit_rows=np.array(logit_rows, np.int32),
            outputs=(POOLED_OUTPUT,) if pooled else outputs,
            hidden_rows=np.array(pooled, np.int32) if pooled else None,
        )

    def _map_pages(
        self,
        parts: Sequence[SequenceRows],
        lengths: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> tuple[tuple[npt.NDArray[np.int32], ...], tuple[npt.NDArray[np.int64], ...]]:
        owner = np.repeat(np.arange(len(parts)), lengths)
        page, offset = np.divmod(positions, self._page_size)
        tables = []
        slots = []
        for group in range(self._num_groups):
            pages = [part.sequence.lease.pages[group] for part in parts]
            width = max(map(len, pages))
            padded = (chain(held, repeat(-1, width - len(held))) for held in pages)
            flat = np.fromiter(chain.from_iterable(padded), np.int32, len(pages) * width)
            table = flat.reshape(len(pages), width)
            tables.append(table)
            slots.append(table[owner, page].astype(np.int64) * self._page_size + offset)
        return tuple(tables), tuple(slots)


def _decodes_one(part: SequenceRows) -> bool:
    return part.decode is not None and len(part.token_ids) == len(part.sampled) == 1


class _DecodeBatch:
    """A step that decodes one token of each sequence, and how it becomes the next such step.

    A sequence is known by its identity, which no other seating shares, and its pages by the
    lease's version, which rises with every change of them. What changes in every step is written
    through memoryviews: after a model's weights have passed through the processor's caches, a
    numpy operation costs as much as the rest of this together.
    """

    __slots__ = (
        "_context",
        "_identities",
        "_page_size",
        "_positions",
        "_predicted",
        "_slots",
        "_tokens",
        "_versions",
        "_width",
        "batch",
        "plain",
    )

    def __init__(
        self, parts: Sequence[SequenceRows], batch: Batch, page_size: int, plain: bool
    ) -> None:
        step = batch.step
        self.batch = batch
        self.plain = plain
        """Whether the rows need nothing beside them, then and later."""
        self._page_size = page_size
        self._identities = [part.sequence.identity for part in parts]
        self._versions = [part.sequence.lease.version for part in parts]
        self._width = step.block_tables[0].shape[1]
        self._tokens = step.token_ids.data
        self._positions = step.positions[0].data
        self._context = step.context_len.data
        self._slots = [slots.data for slots in step.slot_mappings]
        self._predicted = batch.sample.rows["position"].data

    def advance(self, parts: Sequence[SequenceRows]) -> bool:
        """Become the step of ``parts``. False if that is not a decode of the same seatings, or if
        a page table has to be wider: this batch is of no use then.
        """
        identities, versions, size = self._identities, self._versions, self._page_size
        if len(parts) != len(identities):
            return False
        tokens, positions, context = self._tokens, self._positions, self._context
        predicted, mappings = self._predicted, self._slots
        for index, (sequence, token_ids, _, sampled, decode, _) in enumerate(parts):
            if (
                sequence.identity is not identities[index]
                or decode is None
                or len(token_ids) != 1
                or len(sampled) != 1
            ):
                return False
            lease, at = sequence.lease, sequence.computed
            if lease.version != versions[index]:
                if lease.num_pages > self._width:
                    return False
                versions[index] = lease.version
                for table, pages in zip(self.batch.step.block_tables, lease.pages, strict=True):
                    table[index, : len(pages)] = pages
            tokens[index] = token_ids[0]
            positions[index] = at
            context[index] = predicted[index] = at + 1
            page, offset = divmod(at, size)
            for slots, pages in zip(mappings, lease.pages, strict=True):
                slots[index] = pages[page] * size + offset
        return True


def _sample_batch(parts: Sequence[SequenceRows], positions: npt.NDArray[np.int32]) -> SampleBatch:
    """The rows alone. ``positions`` of the tokens whose logits they are; each predicts the one
    after.
    """
    rows = np.empty(len(positions), SAMPLE_ROW)
    data = b"".join(
        [part.sequence.sampler.row * (len(part.scored) + len(part.sampled)) for part in parts]
    )
    rows.view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    index = 0
    for part in parts:
        if part.scored:
            scored = slice(index, index + len(part.scored))
            known = part.sequence.tokens
            rows["num_logprobs"][scored] = part.sequence.seed.params.prompt_logprobs or 0
            rows["target"][scored] = [
                known[part.sequence.computed + offset + 1] for offset in part.scored
            ]
        index += len(part.scored) + len(part.sampled)
    rows["position"] = positions
    rows["position"] += 1
    return SampleBatch(rows)


def _extras(
    rows: npt.NDArray[np.void], parts: Sequence[SequenceRows], kept_rows: int
) -> tuple[SampleBatch, list[Asked]]:
    """The rows, and what sequences add to the rules of their sampled ones, if any does now; and
    the rows whose grammars are asked when they have been sampled.
    """
    asked: list[Asked] = []
    masked: list[GuidedState | None] = []
    end = 0
    for part in parts:
        end += len(part.scored) + len(part.sampled)
        guided = part.sequence.guided if part.sampled else None
        if guided is not None and asked_later(part, len(rows), kept_rows):
            asked.append(Asked(end - 1, part, guided))
            guided = None
        masked.append(guided)
    now = [guided for guided in masked if guided is not None]
    if not now and all(part.sequence.sampler.plain for part in parts if part.sampled):
        return SampleBatch(rows), asked
    compute_together(now)
    bias: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None] = []
    history: list[History | None] = []
    banned: list[npt.NDArray[np.int32] | None] = []
    masks: list[npt.NDArray[np.uint32] | None] = []
    for part, guided in zip(parts, masked, strict=True):
        sampler = part.sequence.sampler
        for _ in part.scored:
            bias.append(None)
            history.append(None)
            banned.append(None)
            masks.append(None)
        own_masks = _grammar_masks(part, guided)
        # A grammar that is at its end wins over ``min_tokens``: nothing else could follow.
        ended = guided is not None and guided.complete
        for _ in part.sampled:
            bias.append(sampler.bias)
            history.append(sampler.history)
            banned.append(None if ended else sampler.banned)
        masks.extend(own_masks)
    return SampleBatch(rows, bias, history, banned, masks), asked


def _grammar_masks(
    part: SequenceRows, guided: GuidedState | None
) -> list[npt.NDArray[np.uint32] | None]:
    """One mask per sampled row: what may follow the known tokens and the drafts before that row."""
    if guided is None:
        return [None] * len(part.sampled)
    if part.decode is None:
        return guided.masks()
    masks = guided.masks(part.token_ids[1 : part.sampled[-1] + 1])
    return [masks[offset] for offset in part.sampled]
