"""One request held open: begin, admit, step, finish or abort."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from steppe.errors import ExecutionError, InvalidRequestError, UnsupportedRequestError
from steppe.request import FinishReason, LLMGenerationRequest
from steppe.runtime.stepped import request as stepped_request
from steppe.runtime.stepped.request import SteppedRequest
from steppe.stepping.types import (
    AdmissionStatus,
    ImmutableDecodeBatch,
    ImmutablePrefillBatch,
    ImmutableStepBatch,
)
from steppe.streaming import StreamChannel
from tests.runtime.asking import ask
from tests.runtime.fakes import assert_clean, fake_runtime, greedy_reference

if TYPE_CHECKING:
    from steppe.request import LLMGenerationRequest as Request
    from steppe.runtime.rank_runtime import LLMRankRuntime
    from steppe.stepping.types import BatchResult, TokenDelta


def begun(runtime: LLMRankRuntime, request: Request, request_id: int = 1) -> SteppedRequest:
    execution = SteppedRequest.begin(runtime, request, request_id)
    assert execution is not None
    return execution


def run_out(execution: SteppedRequest) -> tuple[list[TokenDelta], list[BatchResult]]:
    """Decode until nobody is left."""
    deltas, finished = [], []
    while residents := tuple(execution.residents()):
        result = execution.decode(ImmutableDecodeBatch(residents))
        deltas += [delta for _, delta in result.deltas]
        finished += [done for _, done in result.finished]
    return deltas, finished


# ---- begin ---------------------------------------------------------------------------------------


def test_beginning_seats_the_founder_and_runs_nothing() -> None:
    runtime, backend = fake_runtime()
    execution = begun(runtime, ask("founder"))
    assert execution.mixed_steps
    assert [(ref.slot, ref.epoch) for ref in execution.residents()] == [(0, 1)]
    assert backend.launches == 0
    execution.abort()


def test_beginning_is_refused_while_one_is_open() -> None:
    runtime, _ = fake_runtime()
    execution = begun(runtime, ask())
    assert SteppedRequest.begin(runtime, ask(), 2) is None
    execution.abort()
    begun(runtime, ask(), 2).abort()
    assert_clean(runtime)


@pytest.mark.parametrize(
    ("request_", "field"),
    [(ask(""), "prompt"), (ask("x", 999), "max_tokens"), (ask(n=9), "requests")],
)
def test_beginning_raises_what_the_blocking_call_raises(request_: Request, field: str) -> None:
    runtime, _ = fake_runtime()
    for start in (
        lambda: SteppedRequest.begin(runtime, request_, 1),
        lambda: runtime.handle_request(request_),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            start()
        assert caught.value.field == field
    assert_clean(runtime)


def test_nobody_has_request_id_zero() -> None:
    runtime, _ = fake_runtime()
    with pytest.raises(InvalidRequestError, match="request_id"):
        SteppedRequest.begin(runtime, ask(), 0)
    assert_clean(runtime)


def test_founders_without_room_are_not_begun() -> None:
    runtime, _ = fake_runtime(pages=2)
    batch = LLMGenerationRequest.batch([ask("a" * 8, 8), ask("b" * 8, 8)])
    with pytest.raises(ExecutionError, match="does not fit the page pool"):
        SteppedRequest.begin(runtime, batch, 1)
    assert_clean(runtime)


# ---- the stepped plane is the blocking call ------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 8])
def test_stepped_execution_is_handle_request_token_for_token(count: int) -> None:
    runtime, backend = fake_runtime()
    request = ask("founder", count, temperature=1.0, seed=3, logprobs=2, stop=("zzz",))
    whole = runtime.handle_request(request)
    blocking = list(backend.steps)
    execution = begun(runtime, request)
    (founder,) = execution.residents()
    first = execution.prefill(ImmutablePrefillBatch(founder))
    deltas, _ = run_out(execution)
    deltas = [delta for _, delta in first.deltas] + deltas
    response = execution.finish()
    assert response == whole
    assert backend.steps == blocking * 2
    assert response is not None
    assert tuple(token for delta in deltas for token in delta.token_ids) == response.token_ids
    assert "".join(delta.text for delta in deltas) == response.text
    assert tuple(one for delta in deltas for one in delta.logprobs or ()) == response.logprobs
    assert_clean(runtime)


def test_several_founders_stay_for_the_response() -> None:
    runtime, _ = fake_runtime()
    request = ask("both", 3, n=2, temperature=1.0, seed=9)
    execution = begun(runtime, request)
    for founder in execution.residents():
        execution.prefill(ImmutablePrefillBatch(founder))
    run_out(execution)
    assert execution.finish() == runtime.handle_request(request)


def test_joiners_results_leave_with_their_step_only() -> None:
    runtime, _ = fake_runtime()
    execution = begun(runtime, ask("founder", 6))
    execution.prefill(ImmutablePrefillBatch(execution.residents()[0]))
    joined = execution.admit(ask("joiner", 2), 1, 2)
    assert joined.ref is not None
    execution.prefill(ImmutablePrefillBatch(joined.ref))
    _, finished = run_out(execution)
    assert [done.original_index for done in finished] == [1, 0]
    response = execution.finish()
    assert response is not None
    assert [output.token_ids for output in response.outputs] == [
        tuple(greedy_reference(b"founder", 6))
    ]
    assert finished[0].token_ids == tuple(greedy_reference(b"joiner", 2))


def test_a_result_materializes_as_the_response_alone() -> None:
    runtime, _ = fake_runtime()
    joiner = ask("joiner", 3, logprobs=1, seed=4)
    alone = runtime.handle_request(joiner)
    execution = begun(runtime, ask("founder", 6))
    execution.prefill(ImmutablePrefillBatch(execution.residents()[0]))
    joined = execution.admit(joiner, 1, 2)
    assert joined.ref is not None
    execution.prefill(ImmutablePrefillBatch(joined.ref))
    _, finished = run_out(execution)
    assert execution.materialize(finished[0], ()) == alone
    execution.finish()


# ---- admission -----------------------------------------------------------------------------------


def test_a_joiner_is_one_valid_sequence() -> None:
    runtime, _ = fake_runtime()
    execution = begun(runtime, ask())
    before = execution.residents(), runtime.pool.free_pages
    for bad in (ask(n=2), LLMGenerationRequest.batch([ask()])):
        with pytest.raises(UnsupportedRequestError, match="only a single sequence"):
            execution.admit(bad, 1, 2)
    for bad in (ask(""), ask("x", 999)):
        with pytest.raises(InvalidRequestError):
            execution.admit(bad, 1, 2)
    assert (execution.residents(), runtime.pool.free_pages) == before
    execution.abort()


class Counting:
    """Counts how often a prompt is tokenized."""

    def __init__(self, runtime: LLMRankRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        tokenize = runtime.preparation.tokenize

        def counted(request: Request) -> tuple[int, ...]:
            self.count += 1
            return tokenize(request)

        monkeypatch.setattr(runtime.preparation, "tokenize", counted)


def test_a_waiting_head_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = fake_runtime(max_batch_size=1)
    execution = begun(runtime, ask("founder", 3))
    counting = Counting(runtime, monkeypatch)
    head = ask("waits", 2)
    for _ in range(5):
        assert execution.admit(head, 1, 2).status is AdmissionStatus.NO_CAPACITY
    assert counting.count == 1
    execution.prefill(ImmutablePrefillBatch(execution.residents()[0]))
    run_out(execution)
    admitted = execution.admit(head, 1, 2)
    assert admitted.status is AdmissionStatus.ADMITTED
    assert counting.count == 1
    assert admitted.ref is not None
    execution.prefill(ImmutablePrefillBatch(admitted.ref))
    _, finished = run_out(execution)
    assert finished[0].token_ids == tuple(greedy_reference(b"waits", 2))
    execution.finish()


def test_an_unseeded_head_keeps_its_seed_while_it_waits() -> None:
    runtime, _ = fake_runtime(max_batch_size=1)
    execution = begun(runtime, ask("founder", 3))
    head = ask("waits", 2, temperature=1.0)
    execution.admit(head, 1, 2)
    first = execution._intents[2].seed.seed
    execution.admit(head, 1, 2)
    assert execution._intents[2].seed.seed == first
    execution.abort()


def test_another_index_is_another_intent(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = fake_runtime(max_batch_size=1)
    execution = begun(runtime, ask("founder", 3))
    counting = Counting(runtime, monkeypatch)
    execution.admit(ask("waits"), 1, 2)
    execution.admit(ask("waits"), 2, 2)
    assert counting.count == 2
    execution.abort()


def test_intents_of_many_waiting_requests_are_bounded() -> None:
    runtime, _ = fake_runtime(max_batch_size=1)
    execution = begun(runtime, ask("founder", 3))
    for index in range(1, 50):
        execution.admit(ask("waits"), index, index + 1)
    assert len(execution._intents) == stepped_request.WAITING_INTENTS
    execution.abort()


def test_a_resident_has_its_requests_channel() -> None:
    runtime, _ = fake_runtime()
    channel = StreamChannel()
    channel.attach()  # the engine has claimed it
    execution = begun(runtime, ask(channel=channel))
    assert execution.channel(execution.residents()[0]) is channel
    joined = execution.admit(ask("plain"), 1, 2)
    assert joined.ref is not None
    assert execution.channel(joined.ref) is None
    execution.abort()
    assert not channel.finished


# ---- the end -------------------------------------------------------------------------------------


def test_finishing_waits_for_the_last_resident() -> None:
    runtime, _ = fake_runtime()
    execution = begun(runtime, ask("a", 2))
    with pytest.raises(ExecutionError, match="when nobody is seated"):
        execution.finish()
    execution.prefill(ImmutablePrefillBatch(execution.residents()[0]))
    run_out(execution)
    assert execution.finish() is not None
    assert_clean(runtime)
    for late in (
        execution.finish,
        lambda: execution.admit(ask(), 1, 2),
        lambda: execution.materialize(None, ()),  # type: ignore[arg-type]
    ):
        with pytest.raises(ExecutionError, match="is over"):
            late()


def test_a_founder_that_was_preempted_for_good_has_no_response() -> None:
    runtime, _ = fake_runtime()
    execution = begun(runtime, ask("a", 2))
    execution.step(ImmutableStepBatch(preempt=tuple(execution.residents())))
    assert execution.finish() is None
    assert_clean(runtime)


def test_a_preempted_sequence_may_return_to_an_empty_execution() -> None:
    runtime, _ = fake_runtime()
    execution = begun(runtime, ask("a", 4))
    execution.prefill(ImmutablePrefillBatch(execution.residents()[0]))
    result = execution.step(ImmutableStepBatch(preempt=tuple(execution.residents())))
    ((_, seed),) = result.preempted
    back = execution.admit(ask("a", 4), 0, 1, resume=seed)
    assert back.ref is not None
    execution.prefill(ImmutablePrefillBatch(back.ref))
    run_out(execution)
    response = execution.finish()
    assert response is not None
    assert response.token_ids == tuple(greedy_reference(b"a", 4))


def test_aborting_frees_everything_and_is_idempotent() -> None:
    runtime, _ = fake_runtime()
    execution = begun(runtime, ask("founder"))
    execution.admit(ask("joiner"), 1, 2)
    execution.abort()
    execution.abort()
    assert_clean(runtime)
    assert execution.residents() == []


@pytest.mark.parametrize("launch", [1, 2, 3])
def test_a_failing_operation_kills_the_batch_and_not_the_runtime(launch: int) -> None:
    runtime, _ = fake_runtime(fail_at=launch)
    execution = begun(runtime, ask("founder", 6))

    def run() -> None:
        execution.prefill(ImmutablePrefillBatch(execution.residents()[0]))
        run_out(execution)

    with pytest.raises(ExecutionError, match="fails here"):
        run()
    execution.abort()
    assert_clean(runtime)
    response = runtime.handle_request(ask("next", 2))
    assert response is not None
    assert response.finish_reason is FinishReason.LENGTH
