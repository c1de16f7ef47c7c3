"""A trace in virtual time, on an engine whose steps have known prices."""

from __future__ import annotations

import pytest

from steppe.bench.cost import CostModel
from steppe.bench.schedule import Arrival, Lengths, poisson
from steppe.bench.simulate import Deployment, simulate
from steppe.bench.stats import Objectives, summarize
from steppe.errors import ConfigError

FLAT = CostModel(prices=(1.0, 0.0, 0.0, 0.0, 0.0), gap=(0.25, 0.0), admission=0.5)
"""A second a step, whatever is in it."""
HEADER = {
    "max_batch_size": 4,
    "max_step_tokens": None,
    "max_pending": 32,
    "scheduling": "fcfs",
    "context_length": 100,
    "page_size": 10,
    "pages": 40,
    "page_bytes": 1000,
}


def test_every_second_is_accounted_for() -> None:
    arrivals = [Arrival(0, 0.0, 20, 3), Arrival(1, 10.0, 20, 2)]
    done = simulate(arrivals, FLAT, Deployment(max_batch_size=4))
    first, second = done.samples
    # Admission 0.5, a step of a second for each token, 0.25 between two of them.
    assert first.chunks == pytest.approx((1.5, 2.75, 4.0))
    assert first.ended == pytest.approx(4.0)
    assert first.tokens == 3
    # Nothing happens until somebody comes.
    assert second.chunks == pytest.approx((11.5, 12.75))
    full = done.occupancy
    assert (full.steps, full.most_batch, full.mean_batch) == (5, 1, 1.0)
    assert full.busy == pytest.approx(5 / 12.75)
    assert full.most_step_tokens == 20
    assert full.most_pages < 1e-9  # of memory without end


def test_each_part_has_its_price() -> None:
    model = CostModel(prices=(1.0, 0.1, 0.01, 1.0, 10.0), gap=(0.0, 0.0), admission=0.0)
    (one,) = simulate([Arrival(0, 0.0, 4, 2)], model, Deployment()).samples
    prefill = 1.0 + 4 * 0.1 + 0.01 + 10 * 0.010
    decode = 1.0 + 0.1 + 0.01 + 5 * 0.001
    assert one.chunks == pytest.approx((prefill, prefill + decode))


def test_the_same_arguments_give_the_same_result(seed: int) -> None:
    model = CostModel(FLAT.prices, FLAT.gap, FLAT.admission, spread=(0.8, 1.0, 1.5))
    arrivals = poisson(0.05, 40, Lengths(5, 30), Lengths(1, 20), seed)
    runs = [simulate(arrivals, model, Deployment.of(HEADER), draw) for draw in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0].samples != runs[2].samples
    assert [one.index for one in runs[0].samples] == list(range(40))
    assert all(one.error is None for one in runs[0].samples)


def test_seats_and_pages_hold_back_who_does_not_fit() -> None:
    together = [Arrival(index, 0.0, 10, 10) for index in range(4)]
    free = CostModel((1.0, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0), 0.0)

    def ends(**given: int) -> list[float]:
        done = simulate(together, free, Deployment.of(HEADER, **given))
        return [one.ended for one in done.samples]

    assert ends() == pytest.approx([10] * 4)
    assert ends(max_batch_size=2) == pytest.approx([10, 10, 20, 20])
    # Twenty tokens each, in pages of ten: five pages seat two of them.
    assert ends(kv_memory=5000) == pytest.approx([10, 10, 20, 20])
    # Ten rows a step: whoever decodes leaves the next prompt that much less.
    assert ends(max_step_tokens=10) == pytest.approx([10, 12, 13, 14])
    full = simulate(together, free, Deployment.of(HEADER, kv_memory=5000)).occupancy
    assert (full.most_batch, full.most_pages) == (2, 0.8)


def test_refusals_are_samples() -> None:
    arrivals = [Arrival(index, 0.0, 10, 10) for index in range(4)] + [Arrival(4, 0.0, 95, 10)]
    done = simulate(arrivals, FLAT, Deployment.of(HEADER, max_pending=2))
    kinds = [one.error for one in done.samples]
    assert kinds == [None, None, "refused_backlog_full", "refused_backlog_full", "invalid_request"]
    summary = summarize(done.samples, Objectives())
    assert summary.completed == 2
    assert summary.late == 0


def test_an_overload_is_told_from_a_busy_engine(seed: int) -> None:
    deployment = Deployment.of(HEADER, max_batch_size=1, max_pending=10_000)
    model = CostModel((0.1, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0), 0.0)  # a request a second
    for rate, kept_up in ((0.5, True), (2.0, False)):
        arrivals = poisson(rate, 400, Lengths(5, 5), Lengths(10, 10), seed)
        summary = summarize(simulate(arrivals, model, deployment).samples, Objectives())
        assert (summary.drift < 0.1) is kept_up
        assert summary.errors == {}


def test_a_deployment_is_the_recorded_one_but_for_what_is_given() -> None:
    assert Deployment.of(HEADER) == Deployment(
        max_batch_size=4, max_pending=32, context=100, page_size=10, pages=40
    )
    other = Deployment.of(
        {**HEADER, "max_step_tokens": 64, "scheduling": "fair"}, kv_memory=7999, max_batch_size=9
    )
    assert other.pages == 7
    assert other.max_batch_size == 9
    assert (other.max_step_tokens, other.scheduling) == (64, "fair")
    assert Deployment.of({**HEADER, "max_pending_tokens": 90}).max_pending_tokens == 90
    steps = Deployment.of({**HEADER, "max_step_tokens": 64}, max_step_tokens="auto")
    assert steps.max_step_tokens is None
    with pytest.raises(ConfigError, match="999 bytes hold no page"):
        Deployment.of(HEADER, kv_memory=999)
