"""The statistics against numpy, and the words they are about against examples."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.bench.stats import (
    LATE,
    Objectives,
    Quantiles,
    Sample,
    drift,
    percentile,
    summarize,
)

SECONDS = st.floats(0, 1e6)


@given(st.lists(SECONDS, min_size=1, max_size=200), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    ours = percentile(sorted(values), percent)
    assert ours == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


@given(st.lists(SECONDS, min_size=1, max_size=200))
def test_quantiles_are_numpys(values: list[float]) -> None:
    ours = Quantiles.of(values)
    assert ours.mean == pytest.approx(float(np.mean(values)), rel=1e-9, abs=1e-9)
    for name, percent in (("p50", 50), ("p90", 90), ("p99", 99), ("most", 100)):
        wanted = float(np.percentile(values, percent))
        assert getattr(ours, name) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_nothing_has_no_quantiles() -> None:
    assert set(dataclasses.astuple(Quantiles.of([]))) == {None}


def test_drift_is_the_slope_of_the_later_half(rng: np.random.Generator) -> None:
    due = np.sort(rng.uniform(0, 100, 41))
    whole = rng.uniform(0, 3, 41) + 0.2 * due
    later = slice(20, None)
    wanted = np.polyfit(due[later], whole[later], 1)[0]
    points = list(zip(due.tolist(), whole.tolist(), strict=True))
    rng.shuffle(points)
    assert drift(points) == pytest.approx(float(wanted), rel=1e-9)


def test_drift_of_too_little_is_none() -> None:
    assert drift([]) == drift([(0.0, 1.0), (1.0, 9.0)]) == 0.0
    assert drift([(5.0, float(i)) for i in range(20)]) == 0.0  # all at once: no trend over time


def sample(**fields: object) -> Sample:
    start = Sample(0, due=10.0, sent=10.0, ended=12.0, chunks=(10.5, 11.0, 12.0), tokens=4)
    return dataclasses.replace(start, prompt_tokens=7, **fields)


def test_latencies_count_from_when_a_request_was_due() -> None:
    one = sample(sent=10.4)
    assert one.first == 0.5
    assert one.whole == 2.0
    assert one.between == 0.5  # 1.5 s for three tokens after the first
    assert one.gaps == [0.5, 1.0]
    assert sample(chunks=(11.0,), tokens=1).between is None
    assert sample(chunks=(), tokens=0).first is None


@pytest.mark.parametrize(
    ("first", "between", "met"),
    [
        (None, None, True), (0.5, None, True), (0.49, None, False),
        (None, 0.5, True), (None, 0.49, False), (0.5, 0.5, True), (0.49, 0.5, False),
    ],
)  # fmt: skip
def test_objectives(first: float | None, between: float | None, met: bool) -> None:
    wanted = Objectives(first, between)
    assert wanted.met(sample()) is met
    assert not wanted.met(sample(error="http_500"))
    single = sample(chunks=(10.1,), tokens=1)
    assert wanted.met(single), "one token has nothing between"
    assert Objectives(1.0).met(sample(chunks=())) is False


def test_a_summary_adds_up() -> None:
    samples = [
        Sample(0, 0.0, 0.0, 2.0, (1.0, 2.0), 2, 10),
        Sample(1, 1.0, 1.0 + LATE * 2, 4.0, (2.0, 4.0), 2, 10),
        Sample(2, 2.0, 2.0, 2.1, (), 0, 0, "http_429"),
        Sample(3, 3.0, 3.0 + LATE / 2, 5.0, (4.5, 5.0), 6, 10),
        Sample(4, 4.0, 4.0, 8.0, (5.0,), 1, 10, "timeout"),
    ]
    summary = summarize(samples, Objectives(first=1.2))
    assert (summary.requests, summary.completed) == (5, 3)
    assert summary.errors == {"http_429": 1, "timeout": 1}
    assert summary.seconds == 8.0
    assert summary.offered == 1.0
    assert summary.served == 3 / 8
    assert (summary.good, summary.goodput) == (2 / 5, 2 / 8)
    assert (summary.output_tokens, summary.prompt_tokens) == (10, 30)
    assert summary.output_rate == 10 / 8
    assert summary.first.most == 1.5
    assert summary.whole.p50 == 2.0
    assert summary.gaps.most == 2.0
    assert summary.late == 1
    assert summary.lateness.most == pytest.approx(LATE * 2)
    assert json.loads(json.dumps(summary.as_json(), allow_nan=False))["whole"]["p50"] == 2.0


def test_a_run_without_answers_has_a_summary_too() -> None:
    summary = summarize([Sample(0, 0.0, 0.0, 0.0, error="connect")], Objectives())
    assert (summary.completed, summary.served, summary.good) == (0, 0.0, 0.0)
    assert math.isinf(summary.offered)
    assert summary.as_json()["offered"] is None
    json.dumps(summary.as_json(), allow_nan=False)
