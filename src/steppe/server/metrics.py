"""What ``/metrics`` says: the engine's counters and gauges, and latencies as clients see them."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from steppe.server.cache_metrics import cache_families, replica_cache_families
from steppe.server.replica_metrics import replica_families

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from steppe.client import ReplicaReport
    from steppe.engine.activity import StepSummary
    from steppe.engine.config import EngineHealth
    from steppe.engine.metrics import EngineMetrics
    from steppe.stepping.cache_metrics import ContextCacheMetrics

__all__ = ["CONTENT_TYPE", "ServerMetrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.075, 0.15, 0.3, 0.6, 1.2, 2.5)
STEP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
HELP = {
    "submitted": "Requests accepted",
    "refused": "Requests refused because the engine was full or stopping",
    "stalls_incompatible": "Boundaries at which the next request could not share the batch",
    "stalls_guided": "Boundaries at which a grammar kept the next request waiting",
    "stalls_founder_only": "Boundaries at which the next request had to wait for an empty batch",
    "stalls_no_capacity": "Boundaries at which the next request found no seat or no memory",
    "admitted_mid_flight": "Requests that joined a running batch",
    "completed": "Requests that completed",
    "cancelled": "Requests that were cancelled",
    "failed": "Requests that failed",
    "steps": "Steps that ran",
    "tokens": "Tokens generated",
    "preemptions": "Sequences that gave up their memory and were resumed later",
    "stalls_pages": "Residents that sat out a step because no page was free",
    "head_skips": "Times a request was passed while it did not fit",
    "expired": "Time limits that passed",
}


class ServerMetrics:
    """Latencies of streams, and the page that has everything. Event loop only.

    Steps are seen when somebody asks for this page; of a very busy time between two such looks only
    the end is still known.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._last_step = 0

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"steppe_{name}", what, buckets=buckets, registry=self._registry)

        self._first = histogram(
            "time_to_first_token_seconds", "From a request to its first token, of streams", FIRST
        )
        self._between = histogram(
            "inter_token_seconds", "From one token to the next, of streams", BETWEEN
        )
        self._whole = histogram("request_seconds", "From a request to the end of its answer", WHOLE)

        self._prompt = histogram(
            "step_prompt_tokens", "Prompt tokens of a step, of the steps seen", TOKENS
        )
        self._decodes = histogram(
            "step_decodes", "Sequences that a step decoded, of the steps seen", TOKENS
        )
        self._step = histogram("step_seconds", "How long a step took, of the steps seen", STEP)

    def first_token(self, seconds: float) -> None:
        """A stream got its first token."""
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """A stream got another token."""
        self._between.observe(seconds)

    def finished(self, seconds: float) -> None:
        """An answer is complete."""
        self._whole.observe(seconds)

    @property
    def last_step(self) -> int:
        """The newest step that was counted."""
        return self._last_step

    def steps(self, steps: Sequence[StepSummary]) -> None:
        """Steps after the last that was counted."""
        for step in steps:
            tokens = sum(count for _, count in step.prefills)
            self._prompt.observe(tokens)
            self._decodes.observe(len(step.decodes))
            self._step.observe(step.seconds)
            self._last_step = step.number
            if step.free_pages is not None and step.page_size is not None:
                self._engine.free_tokens = step.free_pages * step.page_size

    def page(
        self,
        metrics: EngineMetrics,
        health: EngineHealth,
        cache_tokens: int | None,
        replicas: Sequence[ReplicaReport] = (),
        cache: ContextCacheMetrics | None = None,
    ) -> bytes:
        """The exposition."""
        self._engine.cache = cache
        self._engine.state = (metrics, health)
        self._engine.replicas = replicas
        self._engine.cache_tokens = cache_tokens
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Turns a copy of the engine's counters into metric families."""

    def __init__(self) -> None:
        self.state: tuple[EngineMetrics, EngineHealth] | None = None
        self.cache_tokens: int | None = None
        self.cache: ContextCacheMetrics | None = None
        self.free_tokens: int | None = None
        self.replicas: Sequence[ReplicaReport] = ()

    def collect(self) -> Iterator[Metric]:
        if self.state is None:
            return
        metrics, health = self.state
        yield GaugeMetricFamily("steppe_resident", "Sequences that hold a seat", health.resident)
        yield GaugeMetricFamily("steppe_queued", "Sequences that wait for a seat", health.queued)
        if self.cache_tokens is not None:
            # Pages are counted when a step begins; when nobody is seated, nobody holds any.
            free = self.cache_tokens if self.free_tokens is None else self.free_tokens
            used = max(0, self.cache_tokens - free) if health.resident else 0
            yield GaugeMetricFamily("steppe_cache_tokens", "Room of the cache", self.cache_tokens)
            yield GaugeMetricFamily("steppe_cache_used_tokens", "Room that is held", used)
        yield from cache_families(self.cache)
        yield GaugeMetricFamily("steppe_ready", "1 while tokens can flow", float(health.ok))
        for field in fields(metrics):
            if field.name in HELP:
                yield CounterMetricFamily(
                    f"steppe_{field.name}", HELP[field.name], getattr(metrics, field.name)
                )
        yield SummaryMetricFamily(
            "steppe_queue_latency_seconds",
            "From acceptance to the first step",
            metrics.queue_latency_count,
            metrics.queue_latency_total_us / 1e6,
        )
        yield GaugeMetricFamily(
            "steppe_queue_latency_max_seconds",
            "The longest of those waits",
            metrics.queue_latency_max_us / 1e6,
        )
        yield from replica_families(self.replicas)
        yield from replica_cache_families(self.replicas)
