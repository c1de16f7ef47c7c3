"""The engine's counters."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from enum import Enum

__all__ = ["Counters", "EngineMetrics", "StallReason"]


class StallReason(Enum):
    """Why the next request in line could not join the running batch. Values name the counters."""

    INCOMPATIBLE = "stalls_incompatible"
    GUIDED = "stalls_guided"
    FOUNDER_ONLY = "stalls_founder_only"
    NO_CAPACITY = "stalls_no_capacity"


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """A copy of the counters (seed 000). Each is exact; together they are no single moment.

    At rest ``submitted == completed + cancelled + failed``; a request may be counted terminal an
    instant before it is counted submitted. Stalls count boundaries at which the next in line had to
    wait, by reason, so a long wait counts often. Queue latency ends where serving begins; requests
    that end before that have none.

    Beyond the seed: ``steps`` that ran, ``tokens`` delivered, ``preemptions``, ``stalls_pages``
    (residents that sat out a step because no page was free), ``head_skips`` (times a request was
    passed while it did not fit; only under "fair") and ``expired`` deadlines, which are among the
    failed.
    """

    submitted: int = 0
    refused: int = 0
    stalls_incompatible: int = 0
    stalls_guided: int = 0
    stalls_founder_only: int = 0
    stalls_no_capacity: int = 0
    admitted_mid_flight: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    queue_latency_total_us: int = 0
    queue_latency_max_us: int = 0
    queue_latency_count: int = 0
    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    stalls_pages: int = 0
    head_skips: int = 0
    expired: int = 0


class Counters:
    """The counters themselves. ``add`` is for any thread; the attributes are the actor's alone."""

    __slots__ = ("_lock", *(field.name for field in fields(EngineMetrics)))

    submitted: int
    refused: int
    stalls_incompatible: int
    stalls_guided: int
    stalls_founder_only: int
    stalls_no_capacity: int
    admitted_mid_flight: int
    completed: int
    cancelled: int
    failed: int
    queue_latency_total_us: int
    queue_latency_max_us: int
    queue_latency_count: int
    steps: int
    tokens: int
    preemptions: int
    stalls_pages: int
    head_skips: int
    expired: int

    def __init__(self) -> None:
        self._lock = threading.Lock()
        for field in fields(EngineMetrics):
            setattr(self, field.name, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Any thread: raise one of submitted, refused, completed, cancelled, failed, expired."""
        with self._lock:
            setattr(self, name, getattr(self, name) + count)

    def stall(self, reason: StallReason) -> None:
        """Actor: the next in line had to wait at this boundary."""
        setattr(self, reason.value, getattr(self, reason.value) + 1)

    def queue_latency(self, seconds: float) -> None:
        """Actor: a request that waited this long is served from now on."""
        micros = max(0, round(seconds * 1e6))
        self.queue_latency_total_us += micros
        self.queue_latency_max_us = max(self.queue_latency_max_us, micros)
        self.queue_latency_count += 1

    def snapshot(self) -> EngineMetrics:
        """Any thread: a copy."""
        return EngineMetrics(*(getattr(self, field.name) for field in fields(EngineMetrics)))
