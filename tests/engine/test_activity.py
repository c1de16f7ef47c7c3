"""The log of steps: what it says, and that it is written for whoever looks only."""

from __future__ import annotations

from steppe import EngineConfig, LLMGenerationRequest, RequestEngine, SamplingParams
from steppe.engine.activity import StepLog, StepSummary
from steppe.testing import FakeClock, LinearCost, Script, ScriptedRuntime, assert_idle_clean


def make_engine(**script: object) -> tuple[RequestEngine, FakeClock]:
    clock = FakeClock()
    runtime = ScriptedRuntime(Script(cost=LinearCost(clock, per_step=0.5), **script))
    config = EngineConfig(max_batch_size=4, clock=clock)
    return RequestEngine.from_factory(runtime.begin_stepped, config, manual=True), clock


def run(engine: RequestEngine, prompt: int, tokens: int) -> None:
    engine.submit(LLMGenerationRequest([1] * prompt, params=SamplingParams(max_tokens=tokens)))
    while engine.tick():
        pass


def step(number: int) -> StepSummary:
    return StepSummary(number, 0.0, 0.0, (), (), (), (), 0, 0, 0)


def test_a_log_that_nobody_reads_is_not_written() -> None:
    engine, _ = make_engine()
    run(engine, 3, 5)
    assert engine.activity().steps == ()
    run(engine, 3, 5)
    steps = engine.activity().steps
    assert [one.number for one in steps] == list(range(engine.metrics().steps - len(steps) + 1,
                                                       engine.metrics().steps + 1))  # fmt: skip
    assert sum(one.tokens for one in steps) == 5
    assert_idle_clean(engine)


def test_a_log_closes_itself_when_the_reader_is_gone() -> None:
    log = StepLog(4)
    assert not log.watched
    assert log.since(0) == ()
    for number in range(1, 5):
        assert log.watched
        log.add(step(number))
    assert not log.watched
    assert [one.number for one in log.since(2)] == [3, 4]
    log.add(step(5))
    assert log.watched
    assert [one.number for one in log.since(0)] == [2, 3, 4, 5]


def test_a_step_says_when_it_ran_and_who_was_in_it() -> None:
    for mixed in (True, False):
        engine, clock = make_engine(mixed=mixed)
        engine.activity()
        clock.advance(10.0)
        handle = engine.submit(LLMGenerationRequest([1] * 6, params=SamplingParams(max_tokens=3)))
        clock.advance(2.0)
        while engine.tick():
            pass
        steps = engine.activity().steps
        assert steps[0].prefills == ((handle.id, 6),)
        assert steps[0].decodes == ()
        assert (steps[0].began, steps[0].seconds) == (12.0, 0.5)
        assert {one.decodes for one in steps[1:3]} == {(handle.id,)}
        assert steps[0].first_tokens == ((handle.id, 2.5),)
        assert all(one.first_tokens == () for one in steps[1:])
        assert (steps[0].free_pages is None) == (not mixed)
        assert {one.resident for one in steps[:3]} == {1}


def test_live_sequences_are_those_without_an_end() -> None:
    engine, clock = make_engine()
    clock.advance(1.0)
    params = SamplingParams(max_tokens=4, n=2)
    handle = engine.submit(LLMGenerationRequest([1] * 6, params=params))
    text = engine.submit(LLMGenerationRequest("text", params=SamplingParams(max_tokens=9)))
    live = engine.activity().live
    assert [(one.id, one.request_id, one.seat) for one in live] == [
        (handle.id, handle.id, None), (handle.id + 1, handle.id, None), (text.id, text.id, None),
    ]  # fmt: skip
    assert [one.prompt_tokens for one in live] == [6, 6, None]
    assert {one.submitted_at for one in live} == {1.0}
    engine.tick()
    engine.tick()
    live = engine.activity().live
    assert sorted(one.seat for one in live if one.seat is not None) == [0, 1, 2]
    assert all(one.tokens > 0 and not one.stopping for one in live)
    text.cancel()
    assert [one.stopping for one in engine.activity().live] == [False, False, True]
    while engine.tick():
        pass
    assert engine.activity().live == ()
    assert_idle_clean(engine)


def test_a_sequence_that_has_ended_is_not_live_though_its_request_is() -> None:
    engine, _ = make_engine(length=lambda request_id: 2 if request_id == 1 else None)
    params = SamplingParams(max_tokens=9, n=2)
    handle = engine.submit(LLMGenerationRequest([1] * 4, params=params))
    for _ in range(5):
        engine.tick()
    assert not handle.ready
    assert [one.id for one in engine.activity().live] == [handle.id + 1]
    while engine.tick():
        pass
    assert_idle_clean(engine)
