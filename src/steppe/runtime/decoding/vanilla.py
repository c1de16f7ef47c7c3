"""One token a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.runtime.decoding.strategy import Acceptance, DecodeRows, DecodingStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.runtime.sequence import SequenceState

__all__ = ["VanillaDecoding"]


class VanillaDecoding(DecodingStrategy):
    """Computes the last token, samples the next. Keeps no state."""

    name = "vanilla"

    def query_length(self, sequence: SequenceState) -> int:
        return 1

    def rows(self, sequence: SequenceState, query_length: int) -> DecodeRows:
        return DecodeRows((sequence.tokens[-1],), (0,))

    def accept(
        self, sequence: SequenceState, rows: DecodeRows, sampled: Sequence[int]
    ) -> Acceptance:
        return Acceptance(((0, sampled[0]),), computed=1)

    def on_evict(self, sequence: SequenceState) -> None:
        return None
