"""Promise 4 of the runtime: same request, same tokens, whatever the company, the room and the way.

Every answer is compared with ``tests.runtime.reference``, which knows neither pages nor steps.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.request import FinishReason, LLMGenerationRequest, TokenLogprob
from steppe.runtime.stepped.request import SteppedRequest
from steppe.stepping.types import (
    AdmissionStatus,
    BatchResult,
    DecodeEntry,
    ImmutableStepBatch,
    PrefillEntry,
    ResidentNeed,
    ResidentRef,
    SlotSeed,
)
from steppe.streaming import StreamChannel
from tests.property.runtime_requests import Sizes, requests, sizes
from tests.runtime.asking import heard
from tests.runtime.fakes import assert_clean
from tests.runtime.reference import answer

if TYPE_CHECKING:
    from random import Random

    from steppe.stepping.types import StepResult


@settings(max_examples=30)
@given(
    batch=st.lists(requests(most_sequences=3), min_size=1, max_size=4),
    room=sizes(seats=12),
    streams=st.booleans(),
)
def test_the_blocking_loop_answers_as_if_everybody_were_alone(
    batch: list[LLMGenerationRequest], room: Sizes, streams: bool
) -> None:
    runtime = room.runtime()
    if streams:
        batch = [request.with_channel(StreamChannel()) for request in batch]
    response = runtime.handle_request(LLMGenerationRequest.batch(batch))
    assert response is not None
    assert_clean(runtime)
    context = runtime.preparation.context_length
    outputs = iter(response.outputs)
    for request in batch:
        said = heard(request.stream_channel) if request.stream_channel else {}
        for index in range(request.params.n):
            output = next(outputs)
            assert isinstance(request.prompt, tuple)
            expected = answer(
                request.prompt, request.params, sequence_index=index, context_length=context
            )
            expected.check(output)
            if streams:
                one = said[index]
                assert (one.token_ids, one.text) == (output.token_ids, output.text)
                assert one.logprobs == (output.logprobs or ())
                assert one.finish_reason is output.finish_reason
                assert one.stop_reason == output.stop_reason
        if request.stream_channel is not None:
            assert request.stream_channel.finished
    completion = sum(len(output.token_ids) for output in response.outputs)
    prompts = sum(len(request.prompt or ()) for request in batch)
    assert (response.usage.completion_tokens, response.usage.prompt_tokens) == (completion, prompts)


class Heap:
    """All that one sequence was told, step by step."""

    def __init__(self) -> None:
        self.token_ids: tuple[int, ...] = ()
        self.text = ""
        self.logprobs: tuple[TokenLogprob, ...] = ()
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


class Scheduler:
    """Drives a stepped request at random, within the rules, until everybody has ended."""

    def __init__(self, wanted: list[LLMGenerationRequest], room: Sizes, random: Random) -> None:
        self.runtime = room.runtime()
        self.random = random
        self.wanted = wanted
        execution = SteppedRequest.begin(self.runtime, wanted[0], 1)
        assert execution is not None
        self.execution = execution
        self.waiting: list[tuple[int, SlotSeed | None]] = [
            (index, None) for index in range(1, len(wanted))
        ]
        self.seated: dict[ResidentRef, int] = {execution.residents()[0]: 0}
        self.heaps: dict[int, Heap] = defaultdict(Heap)
        self.results: dict[int, BatchResult] = {}
        self.preemptions = 2 * len(wanted)
        self.retired: set[int] = set()

    def run(self) -> None:
        """Until nobody is left."""
        while self.waiting or self.seated:
            if self.waiting and (not self.seated or self.random.random() < 0.4):
                self.admit()
            if self.seated:
                self.commit(self.execution.step(self.batch()))
            self.check_pages()

    def admit(self) -> None:
        index, seed = self.waiting.pop(self.random.randrange(len(self.waiting)))
        result = self.execution.admit(self.wanted[index], index, index + 1, resume=seed)
        if result.status is AdmissionStatus.NO_CAPACITY:
            assert self.seated, "an empty room refused somebody"
            self.waiting.append((index, seed))
            return
        assert result.ref is not None
        assert result.ref not in self.seated
        self.seated[result.ref] = index

    def batch(self) -> ImmutableStepBatch:
        """A random step that the pages allow; one resident moves at least, or makes room."""
        snapshot = self.execution.snapshot()
        needs = list(snapshot.residents)
        assert [need.ref for need in needs] == list(self.seated)
        retire, preempt = [], []
        if self.random.random() < 0.05:
            victim = needs.pop(self.random.randrange(len(needs)))
            retire.append((victim.ref, FinishReason.CANCELLED))
        if needs and self.preemptions and self.random.random() < 0.15:
            self.preemptions -= 1
            preempt.append(needs.pop(self.random.randrange(len(needs))).ref)
        free = snapshot.free_pages
        self.random.shuffle(needs)
        decodes, prefills = [], []
        for position, need in enumerate(needs):
            if position and self.random.random() < 0.3:
                continue
            tokens = self.tokens(need)
            pages = -(-max(0, tokens - need.room) // snapshot.page_size)
            if pages > free:
                continue
            free -= pages
            if need.prefill_remaining:
                prefills.append(PrefillEntry(need.ref, tokens))
            else:
                decodes.append(DecodeEntry(need.ref, tokens))
        if needs and not (decodes or prefills or retire or preempt):
            # Nobody can move: the newest makes room.
            newest = next(ref for ref in reversed(self.seated) if ref in {n.ref for n in needs})
            preempt.append(newest)
        return ImmutableStepBatch(tuple(decodes), tuple(prefills), tuple(retire), tuple(preempt))

    def tokens(self, need: ResidentNeed) -> int:
        if not need.prefill_remaining:
            return need.decode_tokens
        return self.random.randint(1, need.prefill_remaining)

    def commit(self, result: StepResult) -> None:
        assert result.ok
        for ref, delta in result.deltas:
            heap = self.heaps[self.seated[ref]]
            heap.token_ids += delta.token_ids
            heap.text += delta.text
            heap.logprobs += delta.logprobs or ()
            heap.prompt_logprobs += delta.prompt_logprobs or ()
        for ref, done in result.finished:
            index = self.seated.pop(ref)
            assert (done.original_index, done.request_id) == (index, index + 1)
            self.results[index] = done
            if done.finish_reason is FinishReason.CANCELLED:
                self.retired.add(index)
        for ref, seed in result.preempted:
            self.waiting.append((self.seated.pop(ref), seed))
        assert list(self.execution.residents()) == list(self.seated)

    def check_pages(self) -> None:
        session = self.execution._session_open().session
        self.runtime.pool.verify()
        assert list(self.runtime.pool.leases) == [one.lease for one in session.residents]


@settings(max_examples=40)
@given(
    wanted=st.lists(requests(), min_size=1, max_size=5),
    room=sizes(seats=4),
    random=st.randoms(use_true_random=False),
)
def test_any_valid_way_of_stepping_answers_as_if_everybody_were_alone(
    wanted: list[LLMGenerationRequest], room: Sizes, random: Random
) -> None:
    scheduler = Scheduler(wanted, room, random)
    scheduler.run()
    context = scheduler.runtime.preparation.context_length
    response = scheduler.execution.finish()
    assert_clean(scheduler.runtime)
    for index, request in enumerate(wanted):
        result, heap = scheduler.results[index], scheduler.heaps[index]
        assert isinstance(request.prompt, tuple)
        expected = answer(request.prompt, request.params, context_length=context)
        if index in scheduler.retired:
            count = len(result.token_ids)
            assert result.token_ids == expected.token_ids[:count]
            if result.logprobs is not None:
                assert result.logprobs == (expected.logprobs or ())[:count]
        else:
            expected.check(result)  # type: ignore[arg-type]
            assert heap.prompt_logprobs == (result.prompt_logprobs or ())
        assert (heap.token_ids, heap.text) == (result.token_ids, result.text)
        assert heap.logprobs == (result.logprobs or ())
    assert response is not None
    assert response.token_ids == scheduler.results[0].token_ids
    assert response.text == scheduler.results[0].text
