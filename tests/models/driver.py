"""Drives a backend step by step: a page table and a greedy loop, as small as they can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from steppe.backends.base import SAMPLE_ROW, SampleBatch, StepInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from steppe.backends.base import Backend, Program, StepOutput


class Driver:
    """Sequences by number over one backend. Pages are dealt in random order and never freed."""

    def __init__(
        self,
        backend: Backend,
        program: Program,
        rng: np.random.Generator,
        *,
        sequences: int,
        tokens: int,
        kv_dtype: str = "auto",
    ) -> None:
        """Trace ``program``; room for ``sequences`` of at most ``tokens`` tokens each."""
        backend.trace(program, kv_dtype=kv_dtype)
        self.backend = backend
        pages = sequences * -(-tokens // backend.page_size)
        backend.allocate_cache([pages] * len(backend.groups))
        self._free = [list(rng.permutation(pages)) for _ in backend.groups]
        self._tables: dict[int, list[list[int]]] = {}
        self._length: dict[int, int] = {}

    def step(
        self,
        batch: Mapping[int, Sequence[int]],
        *,
        all_logits: bool = False,
        outputs: tuple[str, ...] = (),
        return_logits: bool = True,
        logit_rows: NDArray[np.int32] | None = None,
        hidden_rows: NDArray[np.int32] | None = None,
    ) -> StepOutput:
        """Feed tokens to sequences, in this order; logits of each one's last token, of all, or of
        ``logit_rows``.
        """
        size = self.backend.page_size
        starts = {s: self._length.get(s, 0) for s in batch}
        for sequence, tokens in batch.items():
            tables = self._tables.setdefault(sequence, [[] for _ in self._free])
            self._length[sequence] = starts[sequence] + len(tokens)
            for table, free in zip(tables, self._free, strict=True):
                while len(table) * size < self._length[sequence]:
                    table.append(free.pop())
        positions = [np.arange(starts[s], self._length[s]) for s in batch]
        query_start = np.cumsum([0, *map(len, batch.values())]).astype(np.int32)
        rows = np.arange(query_start[-1]) if all_logits else query_start[1:] - 1
        if logit_rows is not None:
            rows = logit_rows
        groups = range(len(self._free))
        sample = np.zeros(len(rows), SAMPLE_ROW)
        sample["num_logprobs"] = -1
        sample["target"] = -1
        step = StepInput(
            token_ids=np.concatenate([np.asarray(t) for t in batch.values()]).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_start=query_start,
            context_len=np.array([self._length[s] for s in batch], np.int32),
            block_tables=tuple(self._block_table(g, list(batch)) for g in groups),
            slot_mappings=tuple(
                np.concatenate(
                    [
                        np.array(self._tables[s][g])[at // size] * size + at % size
                        for s, at in zip(batch, positions, strict=True)
                    ]
                ).astype(np.int64)
                for g in groups
            ),
            logit_rows=rows.astype(np.int32),
            outputs=outputs,
            hidden_rows=hidden_rows,
            return_logits=return_logits,
        )
        return self.backend.launch(step, SampleBatch(sample)).wait()

    def greedy(
        self, prompts: Mapping[int, Sequence[int]], steps: int, *, return_logits: bool = False
    ) -> tuple[dict[int, list[int]], list[NDArray[np.float32]]]:
        """Generate ``steps`` tokens for every prompt, all in one batch; tokens by sequence, and the
        steps' logits if asked.
        """
        tokens: dict[int, list[int]] = {sequence: [] for sequence in prompts}
        logits: list[NDArray[np.float32]] = []
        batch: dict[int, Sequence[int]] = dict(prompts)
        for _ in range(steps):
            out = self.step(batch, return_logits=return_logits)
            if out.logits is not None:
                logits.append(out.logits)
            for sequence, token in zip(batch, out.sampled, strict=True):
                tokens[sequence].append(int(token))
            batch = {sequence: [tokens[sequence][-1]] for sequence in prompts}
        return tokens, logits

    def _block_table(self, group: int, sequences: list[int]) -> NDArray[np.int32]:
        rows: list[Any] = [self._tables[s][group] for s in sequences]
        table = np.full((len(rows), max(map(len, rows))), -1, np.int32)
        for row, pages in zip(table, rows, strict=True):
            row[: len(pages)] = pages
        return table
