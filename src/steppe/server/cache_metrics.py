"""What ``/metrics`` says of context caches: of all engines together, and of each replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from steppe.client import ReplicaReport
    from steppe.stepping.cache_metrics import ContextCacheMetrics

__all__ = ["cache_families", "replica_cache_families"]

COUNTERS = {
    "queried_tokens": "Prompt tokens that were looked for among computed prefixes",
    "reused_tokens": "Prompt tokens that were found there, and not computed anew",
    "published_pages": "Pages that were filled and can be found",
    "evicted_pages": "Pages that were forgotten to make room",
    "spilled_pages": "Pages that were copied to the spill tier when they were evicted",
    "restored_pages": "Pages that were copied back from there",
}
GAUGES = {
    "cached_pages": "Pages that can be found now",
    "leased_pages": "Pages that sequences hold",
    "pinned_pages": "Pages that system prompts hold",
    "total_pages": "Pages in all",
    "hit_rate": "Reused tokens of those that were looked for",
    "occupancy": "Pages that are held, of those there are",
}


def cache_families(cache: ContextCacheMetrics | None) -> Iterator[Metric]:
    """The families of one cache, or of several as one; none where it is not known."""
    if cache is None:
        return
    for name, what in COUNTERS.items():
        yield CounterMetricFamily(f"steppe_cache_{name}", what, getattr(cache, name))
    for name, what in GAUGES.items():
        yield GaugeMetricFamily(f"steppe_cache_{name}", what, getattr(cache, name))


def replica_cache_families(replicas: Sequence[ReplicaReport]) -> Iterator[Metric]:
    """The same under the label ``replica``, of those that tell of their caches."""
    known = [(one.name, one.cache) for one in replicas if one.cache is not None]
    if not known:
        return
    for kind, told in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
        for name, what in told.items():
            family = kind(f"steppe_replica_cache_{name}", what, labels=("replica",))
            for replica, cache in known:
                family.add_metric([replica], getattr(cache, name))
            yield family
