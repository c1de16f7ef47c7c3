"""From samples to numbers: pure functions, no clock and no randomness.

Latencies count from the moment a request was *due*, not from when the load generator got round to
sending it. A generator that falls behind would otherwise leave the worst waits out ("coordinated
omission"); how late it was is reported beside them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Objectives", "Quantiles", "Sample", "Summary", "drift", "percentile", "summarize"]

LATE = 0.050
"""Seconds after its due time from which on a request counts as sent late."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it. Times are seconds since the start of the run.

    ``chunks`` are the times at which text came; ``tokens`` is how many tokens that was, as the
    server says, or else one per chunk. ``error`` is a kind, such as ``http_429``, or None.
    """

    index: int
    due: float
    sent: float
    ended: float
    chunks: tuple[float, ...] = ()
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float | None:
        """Seconds to the first token."""
        return self.chunks[0] - self.due if self.chunks else None

    @property
    def whole(self) -> float:
        """Seconds to the end."""
        return self.ended - self.due

    @property
    def between(self) -> float | None:
        """Mean seconds from one token to the next; None for fewer than two."""
        if self.tokens < 2 or len(self.chunks) < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds from each chunk to the next: what a reader sees stutter."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a user would call good: seconds to the first token, mean seconds between tokens."""

    first: float | None = None
    between: float | None = None

    def met(self, sample: Sample) -> bool:
        """Whether a request succeeded, and fast enough."""
        if sample.error is not None:
            return False
        if self.first is not None and (sample.first is None or sample.first > self.first):
            return False
        between = sample.between
        return self.between is None or between is None or between <= self.between


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Percentiles of something measured in seconds; None of nothing."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    most: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Those of ``values``, in any order."""
        if not values:
            return cls()
        ordered = sorted(values)
        return cls(
            math.fsum(ordered) / len(ordered),
            percentile(ordered, 50),
            percentile(ordered, 90),
            percentile(ordered, 99),
            ordered[-1],
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of ``ordered`` lie, interpolated linearly between ranks
    (numpy's default, type 7 of Hyndman and Fan). ``ordered`` rises and is not empty.
    """
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. Rates are per second of the run, from the first due time to the last end.

    ``offered`` is the rate of arrivals, ``served`` that of answers; ``goodput`` that of answers
    which met the objectives, ``good`` their share of all requests. ``drift`` is by how many seconds
    whole answers took longer per second of the run's second half: near 0 while the server keeps up,
    about ``offered / capacity - 1`` when it does not. ``late`` requests were sent more than 50 ms
    after they were due: then it is the load generator that was measured, not only the server.
    """

    requests: int
    completed: int
    errors: dict[str, int]
    seconds: float
    offered: float
    served: float
    goodput: float
    good: float
    prompt_tokens: int
    output_tokens: int
    output_rate: float
    first: Quantiles
    between: Quantiles
    gaps: Quantiles
    whole: Quantiles
    drift: float
    late: int
    lateness: Quantiles
    objectives: Objectives = field(default_factory=Objectives)

    def as_json(self) -> dict[str, Any]:
        """Plain values; a rate without a limit is null."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def summarize(samples: Sequence[Sample], objectives: Objectives) -> Summary:
    """Everything about a run of at least one request."""
    done = [one for one in samples if one.error is None]
    start = min(one.due for one in samples)
    seconds = max(one.ended for one in samples) - start
    window = max(one.due for one in samples) - start
    good = sum(objectives.met(one) for one in samples)
    tokens = sum(one.tokens for one in done)
    lateness = [max(0.0, one.sent - one.due) for one in samples]
    return Summary(
        requests=len(samples),
        completed=len(done),
        errors=dict(sorted(Counter(one.error for one in samples if one.error).items())),
        seconds=seconds,
        offered=_per_second(len(samples) - 1, window) if window else math.inf,
        served=_per_second(len(done), seconds),
        goodput=_per_second(good, seconds),
        good=good / len(samples),
        prompt_tokens=sum(one.prompt_tokens for one in done),
        output_tokens=tokens,
        output_rate=_per_second(tokens, seconds),
        first=Quantiles.of([one.first for one in done if one.first is not None]),
        between=Quantiles.of([one.between for one in done if one.between is not None]),
        gaps=Quantiles.of([gap for one in done for gap in one.gaps]),
        whole=Quantiles.of([one.whole for one in done]),
        drift=drift([(one.due, one.whole) for one in done]),
        late=sum(seconds > LATE for seconds in lateness),
        lateness=Quantiles.of(lateness),
        objectives=objectives,
    )


def _per_second(count: int, seconds: float) -> float:
    if not count:
        return 0.0
    return count / seconds if seconds > 0 else math.inf


def drift(points: Sequence[tuple[float, float]]) -> float:
    """By how much latency grows per second: the least-squares slope of (due, latency) over the
    later half of the due times. The earlier half is where an empty server fills up. 0 for too few.
    """
    points = sorted(points)
    points = points[len(points) // 2 :]
    if len(points) < 3:
        return 0.0
    mean_x = math.fsum(x for x, _ in points) / len(points)
    mean_y = math.fsum(y for _, y in points) / len(points)
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return 0.0
    return math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread
