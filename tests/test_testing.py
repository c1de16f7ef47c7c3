"""The public seams do what their page says, and notice what they are there to notice."""

from __future__ import annotations

import textwrap

import pytest

import steppe.testing
from steppe.engine import EngineConfig, RequestEngine, ShutdownMode
from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.testing import FakeClock, LinearCost, Script, ScriptedRuntime, assert_idle_clean


def test_the_example_runs() -> None:
    text = (steppe.testing.__doc__ or "").split("\n\n", 1)[1]
    code = compile(textwrap.dedent(text), "steppe.testing", "exec")
    exec(code, {**vars(steppe.testing), **globals()})


def test_an_engine_that_holds_something_is_not_clean() -> None:
    runtime = ScriptedRuntime(Script(pages=100))
    engine = RequestEngine.from_factory(runtime.begin_stepped, manual=True)
    engine.submit(LLMGenerationRequest([1, 2], params=SamplingParams(max_tokens=5)))
    with pytest.raises(
        AssertionError,
        match=r"1 live records; 1 backlog places; 2 prompt tokens in the backlog; commands",
    ):
        assert_idle_clean(engine)
    engine.tick()
    with pytest.raises(AssertionError, match=r"1 seats; an open batch; 1 submitted, 0 ended"):
        assert_idle_clean(engine)
    assert [one for one in runtime.leaks() if "pages are still taken" in one]
    engine.shutdown(ShutdownMode.CANCEL)
    assert_idle_clean(engine)


def test_time_passes_when_told_or_as_steps_cost() -> None:
    clock = FakeClock(10.0)
    clock.advance(2.5)
    assert clock() == 12.5
    runtime = ScriptedRuntime(Script(cost=LinearCost(clock, 1.0, 0.1, 0.01)))
    engine = RequestEngine.from_factory(
        runtime.begin_stepped, EngineConfig(clock=clock), manual=True
    )
    engine.submit(LLMGenerationRequest([1] * 20, params=SamplingParams(max_tokens=3)))
    while engine.tick():
        pass
    assert clock() == pytest.approx(12.5 + 3 * 1.0 + 2 * 0.1 + 20 * 0.01)
