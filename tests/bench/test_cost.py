"""Prices are recovered from recordings whose prices are known."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from steppe.bench.cost import PARTS, CostModel, StepWork, fit, non_negative, observe
from steppe.bench.schedule import Lengths, poisson
from steppe.bench.simulate import Deployment
from steppe.engine.config import EngineConfig
from steppe.engine.request_engine import RequestEngine
from steppe.errors import ConfigError
from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.testing import FakeClock, Script, ScriptedRuntime

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from steppe.stepping.script import ScriptedResident

PRICES = (0.004, 0.0004, 0.0003, 0.001, 0.0005)
ADMISSION, GAP = 0.0007, 0.0002


class Priced:
    """Steps that cost exactly what ``PRICES`` say, in the words of the engine's residents."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def charge_admission(self, prompt_tokens: int) -> None:
        self.clock.advance(ADMISSION)

    def charge_step(
        self,
        rows: Sequence[tuple[ScriptedResident, int]],
        chunks: Sequence[tuple[ScriptedResident, int]],
    ) -> None:
        seconds = PRICES[0]
        for one, _ in rows:
            seconds += PRICES[1] + PRICES[2] + PRICES[3] * (one.computed + 1) / 1000
        for one, tokens in chunks:
            keys = sum(one.computed + place for place in range(1, tokens + 1))
            seconds += PRICES[1] * tokens + PRICES[4] * keys / 1000
            seconds += PRICES[2] * (one.computed + tokens == len(one.seed.prompt_token_ids))
        self.clock.advance(seconds)


def record(path: Path, seed: int, *, mixed: bool = True, requests: int = 60) -> None:
    """A run of random requests, in virtual time."""
    clock = FakeClock(1000.0)
    runtime = ScriptedRuntime(Script(mixed=mixed, capacity=8, cost=Priced(clock)), keep_log=False)
    engine = RequestEngine.from_factory(
        runtime.begin_stepped,
        EngineConfig(max_batch_size=8, max_step_tokens=64, clock=clock),
        manual=True,
    )
    arrivals = poisson(20.0, requests, Lengths(3, 90), Lengths(1, 30), seed)
    waiting = [(one.at + 1000.0, one) for one in arrivals]
    sizes = {"context_length": 4096, "page_size": 16, "pages": 512, "page_bytes": 1000}
    with engine.record(path, **sizes):
        while True:
            while waiting and waiting[0][0] <= clock():
                _, one = waiting.pop(0)
                params = SamplingParams(max_tokens=one.output_tokens)
                engine.submit(LLMGenerationRequest([1] * one.prompt_tokens, params=params))
            if engine.tick():
                if engine.resident:
                    clock.advance(GAP)
            elif waiting:
                clock.advance(waiting[0][0] - clock())
            else:
                break
    engine.shutdown()


@pytest.fixture
def recording(tmp_path: Path, seed: int) -> Path:
    record(tmp_path / "run.jsonl", seed)
    return tmp_path / "run.jsonl"


def test_the_prices_of_a_run_are_recovered(recording: Path) -> None:
    observed = observe(recording)
    model = fit(observed)
    assert model.prices == pytest.approx(PRICES, rel=1e-6)
    assert model.admission == pytest.approx(ADMISSION)
    assert model.gap_seconds(5) == pytest.approx(GAP)
    assert model.off_by(1.0) < 1e-6
    assert 1 < observed.most_seated <= 8
    assert observed.most_tokens == 64
    assert observed.header["page_bytes"] == 1000


def test_noise_leaves_the_prices_and_is_the_spread(recording: Path, seed: int) -> None:
    source = random.Random(seed)
    lines = recording.read_text().splitlines()
    late = 0.0
    for number, line in enumerate(lines):
        event = json.loads(line)
        if "began" not in event:
            continue
        event["began"] += late
        if event["event"] == "step":
            late += (event["ended"] + late - event["began"]) * source.uniform(-0.2, 0.2)
        event["ended"] += late
        lines[number] = json.dumps(event)
    recording.write_text("\n".join(lines) + "\n")
    model = fit(observe(recording))
    work = StepWork.of([(1, 50)] * 4, [(40, 0, True)])
    assert model.step_seconds(work) == pytest.approx(CostModel(PRICES, (0, 0), 0).step_seconds(
        work), rel=0.1)  # fmt: skip
    assert list(model.spread) == sorted(model.spread)
    assert 0.7 < model.spread[0] < 0.9
    assert 1.1 < model.spread[-1] < 1.3
    assert 0.05 < model.off_by(0.5) < 0.15


def test_what_a_step_computes() -> None:
    work = StepWork.of([(1, 9), (3, 20)], [(4, 0, False), (2, 7, True)])
    assert work.tokens == 1 + 3 + 4 + 2
    assert work.sampled == 1 + 3 + 1
    assert work.decode_keys == 10 + (21 + 22 + 23)
    assert work.prompt_keys == (1 + 2 + 3 + 4) + (8 + 9)
    assert len(work.features()) == len(PARTS)


def test_no_component_is_negative_and_no_other_such_solution_fits_better(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(30):
        columns = int(draw.integers(1, 6))
        matrix = draw.normal(size=(columns + int(draw.integers(0, 20)), columns))
        target = draw.normal(size=len(matrix))
        found = non_negative(matrix, target)
        assert (found >= 0).all()
        # The optimality conditions: no slope where free, none downhill where held at zero.
        slope = matrix.T @ (matrix @ found - target)
        assert np.abs(slope[found > 0]).max(initial=0.0) < 1e-8
        assert slope[found == 0].min(initial=0.0) > -1e-8


def test_recordings_that_teach_nothing(tmp_path: Path, recording: Path, seed: int) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join(recording.read_text().splitlines()[:20]) + "\n")
    with pytest.raises(ConfigError, match="steps; a model needs at least 20"):
        observe(short)
    plain = tmp_path / "plain.jsonl"
    record(plain, seed, mixed=False)
    with pytest.raises(ConfigError, match="plans nothing"):
        observe(plain)
    with pytest.raises(ConfigError, match="the recording does not say it"):
        Deployment.of({"max_batch_size": 4})


def test_a_failed_step_teaches_nothing_and_empties_the_batch(recording: Path) -> None:
    lines = recording.read_text().splitlines()
    whole = len(observe(recording).steps)
    # The last step failed, as if the run ended there.
    event = json.loads(lines[-1])
    event["result"] = None
    event["ended"] += 1000.0
    recording.write_text("\n".join([*lines[:-1], json.dumps(event)]) + "\n")
    observed = observe(recording)
    assert len(observed.steps) == whole - 1
    assert fit(observed).prices == pytest.approx(PRICES, rel=1e-6)
