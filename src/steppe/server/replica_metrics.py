"""What ``/metrics`` says of each of several replicas, under the label ``replica``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from steppe.client import ReplicaReport

__all__ = ["replica_families"]

LABELS = ("replica",)
OUTCOMES = ("completed", "cancelled", "failed")


def replica_families(replicas: Sequence[ReplicaReport]) -> Iterator[Metric]:
    """The families; none where there is one engine and no replica."""
    if not replicas:
        return

    def gauge(name: str, what: str, values: Sequence[float]) -> Metric:
        family = GaugeMetricFamily(f"steppe_replica_{name}", what, labels=LABELS)
        for one, value in zip(replicas, values, strict=True):
            family.add_metric([one.name], value)
        return family

    yield gauge("in_flight", "Sequences accepted and not ended", [r.in_flight for r in replicas])
    yield gauge("load", "Places taken, of those there are", [r.load for r in replicas])
    yield gauge("in_rotation", "1 while it gets requests", [float(r.in_rotation) for r in replicas])

    starts = CounterMetricFamily(
        "steppe_replica_starts", "Times that its engine was started", labels=LABELS
    )
    tokens = CounterMetricFamily("steppe_replica_tokens", "Tokens generated", labels=LABELS)
    preemptions = CounterMetricFamily(
        "steppe_replica_preemptions",
        "Sequences that gave up their memory and were resumed later",
        labels=LABELS,
    )
    ended = CounterMetricFamily(
        "steppe_replica_requests", "Requests that ended, by outcome", labels=(*LABELS, "outcome")
    )
    refused = CounterMetricFamily(
        "steppe_replica_refused", "Requests refused, by reason", labels=(*LABELS, "reason")
    )
    state = GaugeMetricFamily(
        "steppe_replica_state",
        "1 for the state that it is in",
        labels=(*LABELS, "transport", "state"),
    )
    for one in replicas:
        starts.add_metric([one.name], one.generation)
        tokens.add_metric([one.name], one.tokens)
        preemptions.add_metric([one.name], one.preemptions)
        for outcome in OUTCOMES:
            ended.add_metric([one.name, outcome], getattr(one, outcome))
        for reason, count in sorted(one.refused.items()):
            refused.add_metric([one.name, reason], count)
        state.add_metric([one.name, one.transport, one.state], 1.0)
    yield from (starts, tokens, preemptions, ended, refused, state)
