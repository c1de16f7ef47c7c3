"""The engine over the runtime: whatever is submitted, cancelled and preempted when, everybody gets
one outcome, everybody who was let finish gets the answer it gets alone, and nothing is left behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.engine.config import EngineConfig
from steppe.engine.request_engine import RequestEngine
from steppe.errors import RequestCancelledError
from steppe.request import FinishReason, LLMGenerationRequest
from steppe.runtime.inference_runtime import LLMInferenceRuntime
from tests.property.runtime_requests import Sizes, requests, sizes
from tests.runtime.asking import heard
from tests.runtime.fakes import assert_clean
from tests.runtime.reference import answer

if TYPE_CHECKING:
    from steppe.engine.handle import RequestHandle

LONG_ENOUGH = 2000
"""Ticks within which a handful of short requests must have ended."""


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[LLMGenerationRequest, int, int | None]]:
    """Requests, each with the tick it comes at and the tick it is cancelled at, if it is."""
    ticks = st.integers(0, 12)
    cancels = st.one_of(st.none(), st.none(), st.none(), ticks)
    return draw(
        st.lists(st.tuples(requests(most_sequences=2), ticks, cancels), min_size=1, max_size=5)
    )


@settings(max_examples=30)
@given(wanted=arrivals(), room=sizes(seats=3), chunk=st.integers(1, 40))
def test_every_request_gets_one_outcome_and_the_answer_it_gets_alone(
    wanted: list[tuple[LLMGenerationRequest, int, int | None]], room: Sizes, chunk: int
) -> None:
    rank = room.runtime()
    runtime = LLMInferenceRuntime(rank)
    engine = RequestEngine.from_factory(
        runtime.begin_stepped,
        EngineConfig(max_batch_size=room.max_batch_size, max_step_tokens=chunk),
        manual=True,
    )
    handles: dict[int, RequestHandle] = {}
    busy = True
    tick = 0
    while busy or tick <= 12:
        for index, (request, come, leave) in enumerate(wanted):
            if come == tick:
                handles[index] = engine.submit(request)
            if leave == tick and index in handles:
                handles[index].cancel()
        busy = engine.tick()
        tick += 1
        assert tick < LONG_ENOUGH, "it does not end"
    for index, (request, come, leave) in enumerate(wanted):
        handle = handles[index]
        assert handle.ready
        said = heard(handle.stream)
        try:
            response = handle.get(timeout=0)
        except RequestCancelledError:
            assert leave is not None
            assert leave >= come
            assert handle.stream.finish_reason is FinishReason.CANCELLED
            continue
        for number, output in enumerate(response.outputs):
            assert isinstance(request.prompt, tuple)
            expected = answer(
                request.prompt,
                request.params,
                sequence_index=number,
                context_length=runtime.context_length,
            )
            expected.check(output)
            assert (said[number].token_ids, said[number].text) == (output.token_ids, output.text)
        assert response.usage.prompt_tokens == len(request.prompt or ())
    assert_clean(rank)
    metrics = engine.metrics()
    assert metrics.completed + metrics.cancelled == metrics.submitted == len(wanted)
    assert metrics.failed == 0
    assert engine.leaks() == []
    engine.shutdown()
