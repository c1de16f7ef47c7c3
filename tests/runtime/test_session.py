"""The blocking loop: who is seated when, who hears what, and that nobody's tokens notice."""

from __future__ import annotations

import copy
import math
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from steppe.errors import ExecutionError, InvalidRequestError
from steppe.request import FinishReason, LLMGenerationRequest, SamplingParams
from steppe.runtime.boundary import AdmitDecision, SessionStep
from steppe.streaming import StreamChannel
from tests.runtime.asking import ask, heard
from tests.runtime.fakes import VOCAB, assert_clean, fake_runtime, greedy_reference
from tests.runtime.reference import answer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from steppe.request import LLMGenerationResponse
    from steppe.runtime.boundary import GenerationBoundary
    from steppe.runtime.generation import SteppedGeneration
    from steppe.runtime.pooling import Pooling
    from steppe.runtime.rank_runtime import LLMRankRuntime
    from steppe.runtime.session import GenerationSession
    from steppe.stepping.types import BatchResult


def complete(runtime: LLMRankRuntime, request: LLMGenerationRequest) -> LLMGenerationResponse:
    response = runtime.handle_request(request)
    assert response is not None
    assert_clean(runtime)
    return response


def opened(runtime: LLMRankRuntime, request: LLMGenerationRequest) -> SteppedGeneration:
    generation = runtime.begin_generation(request)
    assert generation is not None
    return generation


def steps(session: GenerationSession) -> Iterator[SessionStep]:
    session.prime_from_prefill()
    yield session.last_step
    while not session.finished:
        assert session.advance()
        yield session.last_step


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7])
def test_n_tokens_are_one_prefill_and_n_minus_one_decodes(count: int) -> None:
    runtime, backend = fake_runtime()
    response = complete(runtime, ask("hello", count))
    assert backend.steps == [[5]] + [[1]] * (count - 1)
    assert response.token_ids == tuple(greedy_reference(b"hello", count))


def test_priming_hands_out_the_prefills_tokens_before_any_step() -> None:
    runtime, backend = fake_runtime()
    with opened(runtime, LLMGenerationRequest.batch([ask("one", 2), ask("three", 2)])) as open_one:
        session = open_one.session
        assert backend.steps == [[3, 5]]
        with pytest.raises(ExecutionError, match="come before any step"):
            session.advance()
        assert session.prime_from_prefill()
        firsts = [delta.token_ids for _, _, delta in session.last_step.deltas]
        assert firsts == [tuple(greedy_reference(prompt, 1)) for prompt in (b"one", b"three")]
        assert not session.prime_from_prefill()
        assert session.last_step == SessionStep()
        assert backend.steps == [[3, 5]]
    assert_clean(runtime)


def test_an_advance_after_the_end_does_nothing() -> None:
    runtime, backend = fake_runtime()
    with opened(runtime, ask("hi", 1)) as generation:
        session = generation.session
        assert not session.finished
        session.prime_from_prefill()
        assert session.finished
        assert not session.advance()
        assert session.last_step == SessionStep()
        assert backend.launches == 1


def test_a_long_prompt_runs_in_chunks_beside_the_decodes_of_others() -> None:
    runtime, backend = fake_runtime(max_step_tokens=4)
    requests = [ask("ab", 6), ask("0123456789", 3)]
    response = complete(runtime, LLMGenerationRequest.batch(requests))
    # The founding prefill has no decodes beside it.
    assert backend.steps[:3] == [[2, 2], [4], [4]]
    for request, output in zip(requests, response.outputs, strict=True):
        assert isinstance(request.prompt, str)
        answer(request.prompt.encode(), request.params).check(output)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
def test_chunks_change_neither_tokens_nor_scores(chunk: int) -> None:
    runtime, _ = fake_runtime(max_step_tokens=chunk)
    request = ask("chunked", 4, logprobs=2, prompt_logprobs=3)
    answer(b"chunked", request.params).check(complete(runtime, request).outputs[0])


def test_a_scored_prompt_generates_nothing_when_asked_for_nothing() -> None:
    runtime, backend = fake_runtime(max_step_tokens=3)
    channel = StreamChannel()
    request = ask("score me", 0, prompt_logprobs=1, channel=channel)
    response = complete(runtime, request)
    answer(b"score me", request.params).check(response.outputs[0])
    assert response.token_ids == ()
    assert backend.steps == [[3], [3], [2]]
    assert heard(channel)[0].finish_reason is FinishReason.LENGTH
    assert response.usage.completion_tokens == 0


def test_a_session_is_not_copied() -> None:
    runtime, _ = fake_runtime()
    with opened(runtime, ask()) as generation:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                duplicate(generation.session)
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                duplicate(generation)


# ---- embeddings ----------------------------------------------------------------------------------


def pooled(prompt: bytes, pooling: Pooling) -> tuple[float, ...]:
    """The fake model's states are (token, position)."""
    states = [(float(token), float(at)) for at, token in enumerate(prompt)]
    chosen = states if pooling == "mean" else states[-1:]
    total = [sum(column) for column in zip(*chosen, strict=True)]
    return tuple(one / math.hypot(*total) for one in total)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_an_embedding_is_of_its_own_prompt_in_any_company(pooling: Pooling, chunk: int) -> None:
    runtime, backend = fake_runtime(pooling=pooling, max_step_tokens=chunk)
    prompts = [b"embed me", b"x", b"and this"]
    embeds = [LLMGenerationRequest(list(prompt), task="embed") for prompt in prompts]
    batch = [embeds[0], ask("talk", 4), embeds[1], embeds[2]]
    response = complete(runtime, LLMGenerationRequest.batch(batch))
    for index, prompt in ((0, prompts[0]), (2, prompts[1]), (3, prompts[2])):
        output = response.outputs[index]
        assert output.embedding == pytest.approx(pooled(prompt, pooling))
        assert (output.token_ids, output.text) == ((), "")
        assert output.finish_reason is FinishReason.STOP
    answer(b"talk", ask("", 4).params).check(response.outputs[1])
    assert response.outputs[1].embedding is None
    assert response.usage.completion_tokens == 4
    assert backend.launches >= 4


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_survives_a_preemption_inside_its_prompt(pooling: Pooling) -> None:
    runtime, _ = fake_runtime(pooling=pooling)
    prompt = b"interrupted"
    request = LLMGenerationRequest(list(prompt), task="embed")
    generation = runtime.begin_generation(request, founder_request_id=1, prefill=False)
    assert generation is not None
    with generation:
        session = generation.session
        (sequence,) = session.residents
        session.run([session.prefill_part(sequence, 5)])
        resumed = session.seat(session.preempt(sequence))
        assert resumed is not None
        session.run([session.prefill_part(resumed, 4)])
        step = session.run([session.prefill_part(resumed, len(prompt) - 4)])
        ((_, _, result),) = step.finished
        assert result.embedding == pytest.approx(pooled(prompt, pooling))


# ---- several sequences ---------------------------------------------------------------------------


def test_n_sequences_share_a_prompt_and_a_channel_and_differ_in_their_draws() -> None:
    runtime, _ = fake_runtime()
    channel = StreamChannel()
    request = ask("dice", 5, n=3, temperature=2.0, seed=4, logprobs=1, channel=channel)
    response = complete(runtime, request)
    said = heard(channel)
    assert sorted(said) == [0, 1, 2]
    for index, output in enumerate(response.outputs):
        assert output.index == index
        answer(b"dice", request.params, sequence_index=index).check(output)
        assert (said[index].token_ids, said[index].text) == (output.token_ids, output.text)
        assert said[index].logprobs == output.logprobs
    assert len({output.token_ids for output in response.outputs}) == 3
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (4, 15)
    # Only the chunk that ends the request says what it has cost.
    assert [said[index].usage for index in range(3)].count(response.usage) == 1
    assert sum(said[index].usage is None for index in range(3)) == 2


def test_a_batch_answers_in_its_own_order_and_on_its_own_channels() -> None:
    runtime, _ = fake_runtime()
    channels = [StreamChannel(), None, StreamChannel()]
    requests = [
        ask(prompt, count, channel=channel)
        for prompt, count, channel in zip(("a", "bcd", "ef"), (6, 1, 3), channels, strict=True)
    ]
    response = complete(runtime, LLMGenerationRequest.batch(requests))
    for request, output in zip(requests, response.outputs, strict=True):
        assert isinstance(request.prompt, str)
        answer(request.prompt.encode(), request.params).check(output)
        if request.stream_channel is not None:
            (said,) = heard(request.stream_channel).values()
            assert (said.token_ids, said.text) == (output.token_ids, output.text)
            assert said.usage is not None
            assert said.usage.completion_tokens == len(output.token_ids)
            assert request.stream_channel.finished
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (6, 10)


def test_a_batch_of_n_counts_every_prompt_once() -> None:
    runtime, _ = fake_runtime()
    batch = LLMGenerationRequest.batch(
        [ask("abc", 1, n=2, seed=1), ask("defgh", 1, sequence_index=3), ask("i", 1)]
    )
    response = complete(runtime, batch)
    assert [output.index for output in response.outputs] == [0, 1, 2, 3]
    assert response.usage.prompt_tokens == 3 + 5 + 1


# ---- memory --------------------------------------------------------------------------------------


def streamed(runtime: LLMRankRuntime) -> tuple[LLMGenerationResponse, list[Any]]:
    channels = [StreamChannel() for _ in range(4)]
    requests = [
        ask(
            f"sequence {index}",
            None if index % 2 else 60,
            channel=channel,
            logprobs=1,
            prompt_logprobs=1,
            ignore_eos=index < 3,
            temperature=1.0 if index % 2 else 0.0,
            seed=index,
            stop=("zz", "qq"),
            logit_bias={256: 1.0},
        )
        for index, channel in enumerate(channels)
    ]
    response = complete(runtime, LLMGenerationRequest.batch(requests))
    said = [heard(channel)[0] for channel in channels]
    return response, [vars(one) for one in said]


def test_a_tiny_pool_says_what_a_large_one_says() -> None:
    # One sequence of 200 tokens fills the tiny pool alone: founders wait, and are preempted.
    large, _ = fake_runtime()
    tiny, backend = fake_runtime(pages=25)
    tiny.overcommit = True
    assert streamed(tiny) == streamed(large)
    prefilled = tiny.prefill_metrics.total_runs
    assert prefilled > 4 == large.prefill_metrics.total_runs, "nobody was preempted"
    assert min(map(len, backend.steps)) == 1


def test_preemption_happens_and_leaves_no_trace() -> None:
    # Both are seated with room for little more than their prompts, and together outgrow 6 pages.
    runtime, backend = fake_runtime(pages=6)
    runtime.overcommit = True
    requests = [ask("first", 30, logprobs=1, prompt_logprobs=0), ask("second", 30, logprobs=0)]
    response = complete(runtime, LLMGenerationRequest.batch(requests))
    for request, output in zip(requests, response.outputs, strict=True):
        assert isinstance(request.prompt, str)
        answer(request.prompt.encode(), request.params).check(output)
    prefilled = sum(count for step in backend.steps for count in step if count > 1)
    assert prefilled > len("first") + len("second"), "nobody was preempted"


def test_founders_without_room_wait_for_it_and_come_in_order() -> None:
    runtime, backend = fake_runtime(pages=4, page_size=8)
    requests = [ask(str(index) * 8, 8) for index in range(4)]  # two pages each: two at a time
    generation = opened(runtime, LLMGenerationRequest.batch(requests))
    order = []
    seated = []
    with generation:
        for step in steps(generation.session):
            seated.append(generation.session.resident_count)
            order += [seed.original_index for _, seed, _ in step.finished]
        response = runtime.finish_generation(generation)
    assert response is not None
    assert order == [0, 1, 2, 3]
    assert max(seated) == 2
    assert backend.steps[0] == [8, 8]
    for request, output in zip(requests, response.outputs, strict=True):
        assert isinstance(request.prompt, str)
        answer(request.prompt.encode(), request.params).check(output)
    assert_clean(runtime)


# ---- cancelling ----------------------------------------------------------------------------------


def test_a_cancel_between_steps_ends_one_sequence_and_no_other() -> None:
    runtime, _ = fake_runtime()
    channels = [StreamChannel(), StreamChannel()]
    batch = LLMGenerationRequest.batch(
        [ask("stay", 6, channel=channels[0]), ask("leave", 6, channel=channels[1])]
    )

    def hook(boundary: GenerationBoundary) -> None:
        if runtime.generation_metrics.generated_tokens == 6:
            channels[1].cancel()

    response = runtime.handle_request(batch, boundary_hook=hook)
    assert response is not None
    answer(b"stay", ask("", 6).params).check(response.outputs[0])
    left = response.outputs[1]
    assert left.finish_reason is FinishReason.CANCELLED
    assert left.token_ids == tuple(greedy_reference(b"leave", 3))
    assert left.text == bytes(left.token_ids).decode("utf-8", "replace")
    assert channels[1].finish_reason is FinishReason.CANCELLED
    assert heard(channels[1])[0].token_ids == left.token_ids
    assert_clean(runtime)


def test_a_cancelled_sequence_says_the_text_it_held_back() -> None:
    runtime, _ = fake_runtime()
    tokens = greedy_reference(b"hold", 3)
    text = bytes(tokens).decode("utf-8", "replace")
    channel = StreamChannel()
    request = ask("hold", 9, stop=(text[1:] + "never",), channel=channel)
    with opened(runtime, request) as generation:
        session = generation.session
        session.prime_from_prefill()
        session.advance()
        session.advance()
        (one,) = session.last_step.deltas
        assert one[2].text == ""
        channel.cancel()
        session.advance()
        (gone,) = session.last_step.finished
        assert gone[2].text == text
        (last,) = session.last_step.deltas
        assert last[2].text == text[1:]
        assert session.finished
    assert_clean(runtime)


def test_a_cancel_before_the_start_costs_a_prefill_and_nothing_more() -> None:
    runtime, backend = fake_runtime()
    channel = StreamChannel()
    channel.cancel()
    response = complete(runtime, ask("late", 6, channel=channel))
    assert response.finish_reason is FinishReason.CANCELLED
    assert backend.launches == 1
    assert channel.finish_reason is FinishReason.CANCELLED


def test_a_cancel_while_waiting_for_a_seat_runs_nothing() -> None:
    runtime, backend = fake_runtime(pages=2, page_size=8)
    channel = StreamChannel()
    batch = LLMGenerationRequest.batch([ask("seated", 8), ask("waits..", 8, channel=channel)])
    with opened(runtime, batch) as generation:
        session = generation.session
        session.prime_from_prefill()
        channel.cancel()
        session.advance()
        ((ref, seed, result),) = session.last_step.finished
        assert (ref.slot, ref.epoch, seed.original_index) == (-1, 0, 1)
        assert (result.finish_reason, result.token_ids) == (FinishReason.CANCELLED, ())
        while not session.finished:
            session.advance()
        response = runtime.finish_generation(generation)
    assert response is not None
    assert [output.finish_reason for output in response.outputs] == [
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
    ]
    assert backend.steps == [[6]] + [[1]] * 7
    assert_clean(runtime)


def test_everybody_cancelled_needs_no_further_launch() -> None:
    runtime, backend = fake_runtime()
    channel = StreamChannel()
    with opened(runtime, ask("all", 9, n=2, channel=channel)) as generation:
        session = generation.session
        session.prime_from_prefill()
        channel.cancel()
        assert session.advance()
        assert session.finished
        assert len(session.last_step.finished) == 2
        assert backend.launches == 1
    assert_clean(runtime)


# ---- joining at a boundary -----------------------------------------------------------------------


class Joiner:
    """A hook that admits requests, one a boundary, and gathers their results."""

    def __init__(self, requests: list[LLMGenerationRequest], first: int = 1) -> None:
        self.waiting = list(requests)
        self.next_index = first
        self.results: dict[int, BatchResult] = {}
        self.decisions: list[AdmitDecision] = []
        self.counts: list[int] = []

    def __call__(self, boundary: GenerationBoundary) -> None:
        self.counts.append(boundary.resident_count)
        self.results |= boundary.take_completed_at_or_above(1)
        if not self.waiting:
            return
        decision = boundary.admit_request(self.waiting[0], self.next_index, self.next_index)
        self.decisions.append(decision)
        if decision is AdmitDecision.ADMITTED:
            self.waiting.pop(0)
            self.next_index += 1


def test_joiners_answer_as_if_alone_and_never_in_the_founders_response() -> None:
    runtime, _ = fake_runtime()
    channels = [StreamChannel(), StreamChannel()]
    joiners = [
        ask("one", 3, temperature=1.0, seed=8, stop=("e",), channel=channels[0]),
        ask("two more", 4, logit_bias={66: 50.0}, logprobs=2, channel=channels[1]),
    ]
    hook = Joiner(joiners)
    founder = ask("founder", 8)
    response = runtime.handle_request(founder, boundary_hook=hook)
    assert response is not None
    assert len(response.outputs) == 1
    answer(b"founder", founder.params).check(response.outputs[0])
    for index, (prompt, request) in enumerate(zip((b"one", b"two more"), joiners, strict=True), 1):
        expected = answer(prompt, request.params)
        expected.check(hook.results[index])  # type: ignore[arg-type]
        channel = request.stream_channel
        assert channel is not None
        said = heard(channel)[0]
        assert (said.token_ids, said.text) == (expected.token_ids, expected.text)
        assert said.finish_reason is expected.finish_reason
    assert hook.results[2].token_ids == (66,) * 4
    assert max(hook.counts) >= 2
    assert hook.counts[-1] == 0
    assert_clean(runtime)


def test_who_is_admitted_at_the_last_boundary_is_served() -> None:
    runtime, _ = fake_runtime()
    hook = Joiner([ask("early", 2), ask("late", 3)])
    response = runtime.handle_request(ask("short", 1), boundary_hook=hook)
    assert response is not None
    assert response.token_ids == tuple(greedy_reference(b"short", 1))
    assert hook.results[1].token_ids == tuple(greedy_reference(b"early", 2))
    assert hook.results[2].token_ids == tuple(greedy_reference(b"late", 3))
    assert_clean(runtime)


def test_a_joiner_without_room_changes_nothing_and_may_try_again() -> None:
    runtime, _ = fake_runtime(max_batch_size=1)
    channel = StreamChannel()
    hook = Joiner([ask("next", 2, channel=channel)])
    response = runtime.handle_request(ask("first", 3), boundary_hook=hook)
    assert response is not None
    refused, last = hook.decisions[:-1], hook.decisions[-1]
    assert set(refused) == {AdmitDecision.NO_CAPACITY}
    assert last is AdmitDecision.ADMITTED
    assert hook.results[1].token_ids == tuple(greedy_reference(b"next", 2))
    assert channel.finish_reason is FinishReason.LENGTH


def test_bad_joiners_are_refused_with_nothing_changed() -> None:
    runtime, _ = fake_runtime()
    used = StreamChannel()
    used.attach()
    bad: list[tuple[LLMGenerationRequest, int, type[Exception], str]] = [
        (ask("x", n=2), 1, InvalidRequestError, "only a single sequence"),
        (LLMGenerationRequest.batch([ask("x")]), 1, InvalidRequestError, "only a single sequence"),
        (ask("x", channel=used), 1, InvalidRequestError, "serves one request"),
        (ask([VOCAB]), 1, InvalidRequestError, "no token"),
        (ask(""), 1, InvalidRequestError, "is empty"),
        (ask("x", 10_000), 1, InvalidRequestError, "the context has 200"),
        (ask("x"), 0, ExecutionError, "belongs to somebody else"),
    ]
    seen = []

    def hook(boundary: GenerationBoundary) -> None:
        while bad:
            request, index, kind, message = bad.pop()
            before = (boundary.resident_count, runtime.pool.used_pages)
            with pytest.raises(kind, match=message):
                boundary.admit_request(request, index, 5)
            assert (boundary.resident_count, runtime.pool.used_pages) == before
            seen.append(message)

    response = runtime.handle_request(ask("founder", 4), boundary_hook=hook)
    assert response is not None
    assert response.token_ids == tuple(greedy_reference(b"founder", 4))
    assert len(seen) == 7
    assert_clean(runtime)


def test_two_joiners_cannot_have_one_index() -> None:
    runtime, _ = fake_runtime()
    errors: list[int] = []

    def hook(boundary: GenerationBoundary) -> None:
        if boundary.resident_count == 1 and not errors:
            boundary.admit_request(ask("a", 1), 4, 4)
            with pytest.raises(ExecutionError, match="index 4"):
                boundary.admit_request(ask("b", 1), 4, 5)
            errors.append(1)
        elif errors == [1]:
            # The first has finished, and its result is still here.
            with pytest.raises(ExecutionError, match="index 4"):
                boundary.admit_request(ask("b", 1), 4, 5)
            errors.append(2)
            assert list(boundary.take_completed_at_or_above(1)) == [4]
            boundary.admit_request(ask("b", 1), 4, 5)

    assert runtime.handle_request(ask("founder", 5), boundary_hook=hook) is not None
    assert errors == [1, 2]
    assert_clean(runtime)


def test_a_joiner_that_nothing_may_follow_dies_alone() -> None:
    runtime, _ = fake_runtime()
    channel = StreamChannel()
    # Every id is a stop and none may come first.
    hopeless = ask("x", 3, min_tokens=1, stop_token_ids=range(VOCAB), channel=channel)
    hook = Joiner([hopeless, ask("fine", 2)])
    response = runtime.handle_request(ask("founder", 6), boundary_hook=hook)
    assert response is not None
    answer(b"founder", ask("", 6).params).check(response.outputs[0])
    assert hook.results[1].finish_reason is FinishReason.ERROR
    assert hook.results[1].error is not None
    assert "masked out" in hook.results[1].error
    assert channel.finish_reason is FinishReason.ERROR
    assert hook.results[2].token_ids == tuple(greedy_reference(b"fine", 2))
    assert_clean(runtime)


def test_a_failing_step_ends_the_channels_of_joiners_too() -> None:
    runtime, _ = fake_runtime(fail_at=4)
    channels = [StreamChannel(), StreamChannel()]
    hook = Joiner([ask("joiner", 9, channel=channels[1])])
    with pytest.raises(ExecutionError, match="fails here"):
        runtime.handle_request(ask("founder", 9, channel=channels[0]), boundary_hook=hook)
    assert [channel.finish_reason for channel in channels] == [FinishReason.ERROR] * 2
    assert_clean(runtime)


def test_a_hook_that_raises_ends_the_generation() -> None:
    runtime, _ = fake_runtime()
    channel = StreamChannel()

    def hook(boundary: GenerationBoundary) -> None:
        raise KeyError("hook")

    with pytest.raises(KeyError, match="hook"):
        runtime.handle_request(ask(channel=channel), boundary_hook=hook)
    assert channel.finish_reason is FinishReason.ERROR
    assert_clean(runtime)


def test_completed_results_leave_once_and_by_index() -> None:
    runtime, _ = fake_runtime()
    batch = LLMGenerationRequest.batch([ask("a", 1), ask("b", 1), ask("c", 1)])
    with opened(runtime, batch) as generation:
        session = generation.session
        session.prime_from_prefill()
        assert sorted(session.take_completed_at_or_above(2)) == [2]
        assert sorted(session.take_completed_at_or_above(0)) == [0, 1]
        assert session.take_completed_at_or_above(0) == {}


def test_a_result_materializes_as_the_response_alone() -> None:
    runtime, _ = fake_runtime()
    joiner = ask("joiner", 4, logprobs=1)
    alone = complete(runtime, joiner)
    made: list[LLMGenerationResponse] = []

    def hook(boundary: GenerationBoundary) -> None:
        results = boundary.take_completed_at_or_above(1).values()
        made.extend(boundary.materialize_result(result) for result in results)
        if boundary.resident_count == 1 and not made:
            boundary.admit_request(joiner, 1, 1)

    runtime.handle_request(ask("founder", 9), boundary_hook=hook)
    assert made == [alone]


def test_parameters_of_a_batch_are_not_its_founders() -> None:
    runtime, _ = fake_runtime()
    warm = SamplingParams(temperature=1.5, seed=3, max_tokens=4, ignore_eos=True)
    hook = Joiner([LLMGenerationRequest("warm", params=warm)])
    runtime.handle_request(ask("cold", 6), boundary_hook=hook)
    answer(b"warm", warm).check(hook.results[1])  # type: ignore[arg-type]
