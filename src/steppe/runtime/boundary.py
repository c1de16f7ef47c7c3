"""What may be done between two steps of a generation, and what a step of it did (seed 002)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steppe.request import LLMGenerationRequest, LLMGenerationResponse
    from steppe.stepping.types import BatchResult, ResidentRef, SlotSeed, TokenDelta

__all__ = ["AdmitDecision", "GenerationBoundary", "GenerationBoundaryHook", "SessionStep"]


class AdmitDecision(Enum):
    """Whether a sequence joined. NO_CAPACITY changed nothing and is worth another try."""

    ADMITTED = "admitted"
    NO_CAPACITY = "no_capacity"


@dataclass(frozen=True, slots=True)
class SessionStep:
    """What sequences gained in one step and who left, by seat and seed.

    A founder that was cancelled before it had a seat leaves with the reference of nobody.
    """

    deltas: tuple[tuple[ResidentRef, SlotSeed, TokenDelta], ...] = ()
    finished: tuple[tuple[ResidentRef, SlotSeed, BatchResult], ...] = ()
    published: bool = False

    def __add__(self, later: SessionStep) -> SessionStep:
        return SessionStep(
            self.deltas + later.deltas,
            self.finished + later.finished,
            self.published or later.published,
        )


class GenerationBoundary(ABC):
    """What a boundary hook may do between two steps of a blocking generation (seed 002)."""

    @abstractmethod
    def admit_request(
        self, request: LLMGenerationRequest, original_index: int, request_id: int
    ) -> AdmitDecision:
        """Join a single-sequence request. Raises for an invalid one; nothing is modified then."""

    @abstractmethod
    def admit_sequence(self, seed: SlotSeed) -> AdmitDecision:
        """Join one prepared sequence."""

    @abstractmethod
    def take_completed_at_or_above(self, first_index: int) -> dict[int, BatchResult]:
        """Move out the results of finished sequences from original index ``first_index`` on."""

    @abstractmethod
    def materialize_result(
        self, result: BatchResult, stop_strings: Sequence[str] = ()
    ) -> LLMGenerationResponse:
        """Turn one finished sequence into the caller-facing response."""

    @property
    @abstractmethod
    def resident_count(self) -> int:
        """Sequences seated now."""


GenerationBoundaryHook = Callable[[GenerationBoundary], None]
"""Called between the steps of ``handle_request``, on its thread."""
