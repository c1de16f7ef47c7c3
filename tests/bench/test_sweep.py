"""The sweep against queues whose capacity is known."""

from __future__ import annotations

import dataclasses
import math

import pytest

from steppe.bench.load import run_load
from steppe.bench.schedule import Lengths, poisson
from steppe.bench.stats import Objectives, Sample, Summary, summarize
from steppe.bench.sweep import Sweep, sustained, sweep
from steppe.errors import ConfigError
from steppe.testing import VirtualLoop, virtually
from tests.bench.virtual import QueueTarget


def sweep_queue(service: float, start: float, seed: int, objectives: Objectives) -> Sweep:
    async def main(loop: VirtualLoop) -> Sweep:
        async def measure(rate: float) -> Summary:
            arrivals = poisson(rate, 1000, Lengths(1, 1), Lengths(2, 2), seed)
            samples = await run_load(
                QueueTarget(service), arrivals, ["x"] * len(arrivals), clock=loop.time
            )
            return summarize(samples, objectives)

        return await sweep(measure, start)

    return virtually(main)


@pytest.mark.parametrize("start", [0.3, 4.0, 100.0])
def test_a_sweep_finds_the_capacity_from_either_side(start: float, seed: int) -> None:
    found = sweep_queue(0.25, start, seed, Objectives())
    assert found.sustained is not None
    assert found.exceeded is not None
    # A random queue near its capacity is undecided; this is what 1000 requests can tell.
    assert 2.8 < found.sustained < found.exceeded < 6.0
    rates = [rate for rate, _ in found.runs]
    assert rates == sorted(rates)
    assert found.exceeded / found.sustained == pytest.approx(2 ** (1 / 16), rel=1e-6)


def test_objectives_are_missed_before_the_capacity(seed: int) -> None:
    found = sweep_queue(0.25, 1.0, seed, Objectives(first=0.3))
    assert found.sustained is None or found.sustained < 2.5


async def always(kept: bool) -> Sweep:
    one = Sample(0, 0.0, 0.0, 1.0, (0.5, 1.0), 2, 1, None if kept else "http_500")

    async def measure(rate: float) -> Summary:
        return summarize([one], Objectives())

    return await sweep(measure, 1.0)


def test_a_sweep_ends_where_there_is_no_end() -> None:
    everything = virtually(lambda _: always(True))
    assert everything.exceeded is None
    assert everything.sustained == everything.runs[-1][0] == 2.0**12
    nothing = virtually(lambda _: always(False))
    assert nothing.sustained is None
    assert nothing.exceeded == nothing.runs[0][0] == 2.0**-12


def test_what_keeping_up_means() -> None:
    good = summarize([Sample(0, 0.0, 0.0, 1.0, (1.0,), 1)], Objectives())
    assert sustained(good)
    for change in ({"errors": {"timeout": 1}}, {"drift": 0.11}, {"good": 0.89}):
        assert not sustained(dataclasses.replace(good, **change)), change


@pytest.mark.parametrize("start", [0.0, -1.0, math.inf, math.nan])
def test_a_sweep_starts_at_a_rate(start: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        sweep_queue(1.0, start, 0, Objectives())
