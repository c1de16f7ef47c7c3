"""The decoding strategy: how many tokens a sequence takes a step, and what comes of them (seed
002).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.runtime.sequence import SequenceState

__all__ = ["Acceptance", "DecodeRows", "DecodingKvHeadroom", "DecodingStrategy"]


@dataclass(frozen=True, slots=True)
class DecodingKvHeadroom:
    """Cache positions a step may write past the tokens it is sure of."""

    base: int = 1
    draft: int = 0


class DecodeRows(NamedTuple):
    """A sequence's part of a decode step: its query tokens, and the offsets whose logits are
    sampled.
    """

    token_ids: tuple[int, ...]
    sampled: tuple[int, ...]


class Acceptance(NamedTuple):
    """What a sequence gains: pairs of (row, token id), rows counting from 0 in
    ``DecodeRows.sampled``.

    ``computed`` of the query tokens stay valid in the cache; the others are overwritten later.
    """

    tokens: tuple[tuple[int, int], ...]
    computed: int
    proposed: int = 0
    accepted: int = 0


class DecodingStrategy(ABC):
    """Advances sequences. One instance serves a runtime; per-sequence state is keyed by resident.

    Actor thread only. Nothing above it assumes one token a step.
    """

    name: str
    is_speculative: bool = False

    def required_kv_headroom(self) -> DecodingKvHeadroom:
        """Room its steps need beyond accepted tokens."""
        return DecodingKvHeadroom()

    @abstractmethod
    def query_length(self, sequence: SequenceState) -> int:
        """Query tokens the next decode step of ``sequence`` would take."""

    @abstractmethod
    def rows(self, sequence: SequenceState, query_length: int) -> DecodeRows:
        """The tokens of a decode step of that length."""

    @abstractmethod
    def accept(
        self, sequence: SequenceState, rows: DecodeRows, sampled: Sequence[int]
    ) -> Acceptance:
        """Turn the tokens sampled from ``rows`` into those the sequence gains, 0 to n of them."""

    @abstractmethod
    def on_evict(self, sequence: SequenceState) -> None:
        """Forget a sequence that leaves, finished or preempted."""
