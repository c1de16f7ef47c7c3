"""What sampling knows of one sequence, kept ready so that a step only fills in positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from steppe.backends.base import SAMPLE_ROW, DrawPurpose, History
from steppe.backends.sampling_rules import GREEDY_BELOW, draws_from_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steppe.request import SamplingParams

__all__ = ["SamplerState", "TokenCounts"]

Int32 = npt.NDArray[np.int32]


class TokenCounts:
    """Distinct tokens of prompt and output with output counts, as arrays that grow in place."""

    def __init__(self, prompt: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._size = len(distinct)
        capacity = self._size + 64
        self._ids = np.zeros(capacity, np.int32)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(capacity, np.int32)
        self._in_prompt = np.zeros(capacity, np.bool_)
        self._in_prompt[: self._size] = True
        self._where = {token: index for index, token in enumerate(distinct)}

    def add(self, token_id: int) -> None:
        """Count one output token."""
        index = self._where.get(token_id)
        if index is None:
            index = self._where[token_id] = self._size
            if index == len(self._ids):
                self._ids, self._counts, self._in_prompt = (
                    np.concatenate([array, np.zeros_like(array)])
                    for array in (self._ids, self._counts, self._in_prompt)
                )
            self._ids[index] = token_id
            self._size += 1
        self._counts[index] += 1

    def view(self) -> History:
        """The arrays as they are now, without copying: good until the next ``add``."""
        size = self._size
        return History(self._ids[:size], self._counts[:size], self._in_prompt[:size])


class SamplerState:
    """One sequence's sampling: a row template and whatever its parameters need beside it.

    ``row`` is one SAMPLE_ROW as bytes; a step copies it and sets ``position`` and ``target``.
    ``plain`` says that it says everything.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        sequence_index: int,
        prompt: tuple[int, ...],
        generated: tuple[int, ...],
        stop_token_ids: frozenset[int],
    ) -> None:
        row = np.zeros(1, SAMPLE_ROW)
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            row[name] = getattr(params, name)
        row["presence_penalty"] = params.presence_penalty
        row["frequency_penalty"] = params.frequency_penalty
        row["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
        row["seed"] = seed
        row["sequence_index"] = sequence_index
        row["purpose"] = DrawPurpose.TARGET
        row["target"] = -1
        self.row: bytes = row.tobytes()
        self.takes_highest = bool(
            row["temperature"][0] < np.float32(GREEDY_BELOW) or row["top_k"][0] == 1
        )
        """Whether the highest logit is taken, whatever it is drawn from."""
        # A top_k of the whole vocabulary is none either, but no row of a step can tell.
        self.draws_from_all = bool(draws_from_all(row, 2**31)[0])
        """Whether it is drawn at random, and from all that is not forbidden."""
        self.bias: tuple[Int32, npt.NDArray[np.float32]] | None = None
        if params.logit_bias:
            self.bias = (
                np.fromiter(params.logit_bias.keys(), np.int32),
                np.fromiter(params.logit_bias.values(), np.float32),
            )
        penalised = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self._counts = TokenCounts(prompt) if penalised else None
        self._min_tokens = params.min_tokens
        self._stops = (
            np.array(sorted(stop_token_ids), np.int32)
            if params.min_tokens and stop_token_ids
            else None
        )
        self.plain = self.bias is None and self._counts is None and self._stops is None
        self._num_generated = 0
        for token_id in generated:
            self.add(token_id)

    @property
    def history(self) -> History | None:
        """Token counts, when some penalty is on."""
        return None if self._counts is None else self._counts.view()

    @property
    def banned(self) -> Int32 | None:
        """Ids that may not be sampled next: the stop set, until ``min_tokens`` exist."""
        return self._stops if self._num_generated < self._min_tokens else None

    def add(self, token_id: int) -> None:
        """Take note of one output token."""
        self._num_generated += 1
        if self._counts is not None:
            self._counts.add(token_id)
