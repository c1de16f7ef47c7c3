"""What a replica has counted: every admitted request has one outcome, whoever runs it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from steppe.engine.metrics import EngineMetrics
from steppe.errors import DeadlineExceededError, RequestCancelledError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steppe.replicas.vocabulary import TokenChunk

__all__ = ["Account", "added"]


@dataclass(slots=True)
class Account:
    """Counters of a replica or of a coordinator. At every instant
    ``submitted == completed + cancelled + failed + live``.
    """

    submitted: int = 0
    refused: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    expired: int = 0
    tokens: int = 0
    live: int = 0

    def begin(self) -> None:
        """A request was accepted."""
        self.submitted += 1
        self.live += 1

    def chunk(self, chunk: TokenChunk) -> None:
        """Some of its output came."""
        self.tokens += len(chunk.token_ids)

    def end(self, error: Exception | None) -> None:
        """It has ended: complete, or with an error."""
        self.live -= 1
        if error is None:
            self.completed += 1
        elif isinstance(error, RequestCancelledError):
            self.cancelled += 1
        else:
            self.failed += 1
            self.expired += isinstance(error, DeadlineExceededError)

    @property
    def ended(self) -> int:
        """Requests that have an outcome."""
        return self.completed + self.cancelled + self.failed

    def over(self, engines: EngineMetrics) -> EngineMetrics:
        """The engines' own counters, with this account of what became of requests."""
        return replace(
            engines,
            submitted=self.submitted,
            refused=self.refused,
            completed=self.completed,
            cancelled=self.cancelled,
            failed=self.failed,
            expired=self.expired,
            tokens=self.tokens,
        )


def added(several: Iterable[EngineMetrics]) -> EngineMetrics:
    """The counters of several engines together; of the maximum, the maximum."""
    counts = dict.fromkeys((field.name for field in fields(EngineMetrics)), 0)
    for one in several:
        for name in counts:
            value = getattr(one, name)
            if name.endswith("_max_us"):
                counts[name] = max(counts[name], value)
            else:
                counts[name] += value
    return EngineMetrics(**counts)
