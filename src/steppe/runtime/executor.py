"""Runs sequences on a backend, and finds each one's part of what comes back."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from steppe.request import TokenLogprob
from steppe.runtime.batches import POOLED_OUTPUT, BatchBuilder
from steppe.runtime.guided.asking import settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from steppe.backends.base import Backend, StepOutput
    from steppe.runtime.decoding.strategy import DecodeRows
    from steppe.runtime.sequence import SequenceState

__all__ = ["SequenceRows", "StepExecutor", "StepOutcome"]


class SequenceRows(NamedTuple):
    """One sequence's part in a step: its query tokens after the computed ones.

    ``scored``, ``sampled`` and ``pooled`` are offsets into ``token_ids``, rising: rows whose next
    prompt token is scored, rows a token is sampled from, rows whose hidden state goes into an
    embedding. ``decode`` is None for prompt tokens.
    """

    sequence: SequenceState
    token_ids: tuple[int, ...]
    scored: tuple[int, ...] = ()
    sampled: tuple[int, ...] = ()
    decode: DecodeRows | None = None
    pooled: tuple[int, ...] = ()


class StepOutcome:
    """A step's output, taken apart into what each sequence's rows gave.

    Rows of logits are in the order of ``parts``, those of a part its scored rows, then its sampled.
    What the backend's arrays hold is converted whole, once, however many rows there are.
    """

    __slots__ = ("_first_rows", "_ids", "_logprobs", "_tokens", "_values", "output", "parts")

    def __init__(self, parts: tuple[SequenceRows, ...], output: StepOutput) -> None:
        self.parts = parts
        self.output = output
        counts = [len(part.scored) + len(part.sampled) for part in parts]
        self._first_rows = list(accumulate(counts, initial=0))
        self._tokens: list[int] = output.sampled.tolist()
        self._logprobs: list[float] = []
        self._ids: list[list[int]] = []
        self._values: list[list[float]] = []
        if output.logprob is not None:
            self._logprobs = output.logprob.tolist()
        if output.top_ids is not None and output.top_logprobs is not None:
            self._ids = output.top_ids.tolist()
            self._values = output.top_logprobs.tolist()

    def scores(self, part: int) -> list[TokenLogprob]:
        """Scores of a part's prompt tokens."""
        rows = self.parts[part]
        if not rows.scored:
            return []
        first = self._first_rows[part]
        count = rows.sequence.seed.params.prompt_logprobs or 0
        return [self._logprob(first + index, count) for index in range(len(rows.scored))]

    def samples(self, part: int) -> tuple[list[int], list[TokenLogprob | None]]:
        """Tokens sampled for a part, -1 where none was possible, and their log-probabilities."""
        rows = self.parts[part]
        first = self._first_rows[part] + len(rows.scored)
        last = first + len(rows.sampled)
        tokens = self._tokens[first:last]
        if rows.sequence.logprobs is None:
            return tokens, [None] * len(tokens)
        count = rows.sequence.seed.params.logprobs or 0
        return tokens, [self._logprob(row, count) for row in range(first, last)]

    def hidden_states(self, part: int) -> npt.NDArray[np.float32]:
        """Final hidden states of a part's pooled rows, in order."""
        first = sum(len(other.pooled) for other in self.parts[:part])
        return self.output.hidden[POOLED_OUTPUT][first : first + len(self.parts[part].pooled)]

    def _logprob(self, row: int, count: int) -> TokenLogprob:
        token, logprob = self._tokens[row], self._logprobs[row]
        top: list[tuple[int, float]] = []
        if count and self._ids:
            pairs = zip(self._ids[row][:count], self._values[row], strict=False)
            top = [pair for pair in pairs if pair[0] >= 0]
        if all(id_ != token for id_, _ in top):
            top.append((token, logprob))
        return TokenLogprob(token, logprob, tuple(top))


class StepExecutor:
    """Runs ragged steps on a backend. Actor thread only."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._batches = BatchBuilder(backend.page_size, len(backend.groups), backend.kept_rows)

    def execute(self, parts: Sequence[SequenceRows], outputs: tuple[str, ...] = ()) -> StepOutcome:
        """Run one step over ``parts``. Their leases must have room. Changes no sequence.

        ``outputs`` names values wanted of every token, in a step without pooled rows. Raises
        ExecutionError when the backend fails.
        """
        step, sample, asked = self._batches.build(parts, outputs)
        output = self._backend.launch(step, sample).wait()
        if asked:
            output = settle(self._backend, asked, sample, output)
        return StepOutcome(tuple(parts), output)
