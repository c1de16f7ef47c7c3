"""The typed operations: their order, their results, and that a refusal changes nothing."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from steppe.errors import ExecutionError
from steppe.request import FinishReason
from steppe.runtime.stepped.request import SteppedRequest
from steppe.stepping.types import (
    AdmissionIntent,
    AdmissionStatus,
    DecodeEntry,
    ImmutableDecodeBatch,
    ImmutablePrefillBatch,
    ImmutableStepBatch,
    PrefillEntry,
    ResidentNeed,
    ResidentRef,
    ScheduledSequenceDescriptor,
    SequenceIdentity,
    SequenceWork,
)
from tests.runtime.asking import ask
from tests.runtime.fakes import VOCAB, assert_clean, fake_runtime, greedy_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from steppe.request import LLMGenerationRequest
    from steppe.runtime.rank_runtime import LLMRankRuntime
    from steppe.runtime.stepped.stepper import RuntimeStepper
    from steppe.stepping.types import StepResult

FOUNDER, JOINER = ResidentRef(0, 1), ResidentRef(1, 1)
NOBODY = ResidentRef(5, 1)


class Room:
    """An open execution with its founder seated and nothing run."""

    def __init__(self, founder: LLMGenerationRequest | None = None, **sizes: Any) -> None:
        self.runtime: LLMRankRuntime
        self.runtime, self.backend = fake_runtime(**sizes)
        execution = SteppedRequest.begin(self.runtime, founder or ask("founder", 6), 1)
        assert execution is not None
        self.execution = execution

    @property
    def stepper(self) -> RuntimeStepper:
        return self.execution.stepper

    def admit(self, request: LLMGenerationRequest, index: int = 1) -> ResidentRef:
        result = self.execution.admit(request, index, index + 1)
        assert result.status is AdmissionStatus.ADMITTED
        assert result.ref is not None
        return result.ref

    def prefill(self, ref: ResidentRef) -> StepResult:
        return self.stepper.prefill(ImmutablePrefillBatch(ref))

    def decode(self) -> StepResult:
        return self.stepper.decode(ImmutableDecodeBatch(tuple(self.stepper.residents())))

    def state(self) -> tuple[Any, ...]:
        """All that a refusal must leave alone."""
        session = self.execution._session_open().session
        return (
            self.backend.launches,
            [(list(one.free), list(one.idle)) for one in self.runtime.pool.groups],
            list(self.runtime._slots._free),
            list(self.runtime._slots._epochs),
            self.stepper.residents(),
            self.stepper.snapshot(),
            [
                (
                    list(one.tokens),
                    one.computed,
                    [list(pages) for pages in one.lease.pages],
                    "".join(one.text.parts),
                    one.finish_reason,
                )
                for one in session.residents
            ],
            copy.copy(self.runtime.prefill_metrics),
            copy.copy(self.runtime.generation_metrics),
        )


@pytest.fixture
def room() -> Iterator[Room]:
    """A room that must be clean once it is closed."""
    room = Room()
    yield room
    room.execution.abort()
    assert_clean(room.runtime)


def refused(room: Room, message: str, batch: Any) -> None:
    """The operation that ``batch`` asks for is refused with nothing changed."""
    operation = {
        ImmutablePrefillBatch: room.stepper.prefill,
        ImmutableDecodeBatch: room.stepper.decode,
        ImmutableStepBatch: room.stepper.step,
    }[type(batch)]
    before = room.state()
    with pytest.raises(ExecutionError, match=message):
        operation(batch)
    assert room.state() == before


# ---- the seed's order ----------------------------------------------------------------------------


def test_the_founding_prefill_is_a_step_like_any_other(room: Room) -> None:
    assert room.stepper.residents() == [FOUNDER]
    assert room.backend.launches == 0
    result = room.prefill(FOUNDER)
    assert (result.ok, result.work, result.step_id) == (True, SequenceWork.CONTEXT, 1)
    identity = SequenceIdentity(1, FOUNDER)
    assert result.participants == (identity,)
    assert result.execution == (
        ScheduledSequenceDescriptor(identity, SequenceWork.CONTEXT, 7, 0, True),
    )
    ((ref, delta),) = result.deltas
    assert (ref, delta.token_ids) == (FOUNDER, tuple(greedy_reference(b"founder", 1)))
    assert (result.finished, result.preempted, result.published_prefix) == ((), (), False)


def test_a_decode_names_everybody_in_order(room: Room) -> None:
    room.prefill(FOUNDER)
    joiner = room.admit(ask("join", 6))
    room.prefill(joiner)
    refused(room, "every live resident", ImmutableDecodeBatch((FOUNDER,)))
    refused(room, "every live resident", ImmutableDecodeBatch((joiner, FOUNDER)))
    refused(room, "every live resident", ImmutableDecodeBatch((FOUNDER, joiner, joiner)))
    refused(room, "every live resident", ImmutableDecodeBatch(()))
    result = room.decode()
    assert result.work is SequenceWork.DECODE
    assert [one.ref for one in result.participants] == [FOUNDER, joiner]
    assert [(one.query_length, one.past_length) for one in result.execution] == [(1, 7), (1, 4)]
    assert [delta.token_ids for _, delta in result.deltas] == [
        tuple(greedy_reference(prompt, 2)[1:]) for prompt in (b"founder", b"join")
    ]
    assert result.step_id == 3


def test_a_prefill_comes_before_any_decode(room: Room) -> None:
    refused(room, "comes before any decode", ImmutableDecodeBatch((FOUNDER,)))
    room.prefill(FOUNDER)
    joiner = room.admit(ask("join"))
    refused(room, "comes before any decode", ImmutableDecodeBatch((FOUNDER, joiner)))


def test_after_an_admission_its_prefill_is_the_only_one(room: Room) -> None:
    joiner = room.admit(ask("join"))
    refused(room, "comes next, not", ImmutablePrefillBatch(FOUNDER))
    room.prefill(joiner)
    refused(room, "has run already", ImmutablePrefillBatch(joiner))
    room.prefill(FOUNDER)
    refused(room, "has run already", ImmutablePrefillBatch(FOUNDER))
    refused(room, "no resident is", ImmutablePrefillBatch(NOBODY))


def test_a_whole_prompt_is_one_step_in_as_many_passes_as_it_takes() -> None:
    room = Room(ask("0123456789", 3), max_step_tokens=4)
    result = room.prefill(FOUNDER)
    assert room.backend.steps == [[4], [4], [2]]
    assert [one.query_length for one in result.execution] == [10]
    assert [delta.token_ids for _, delta in result.deltas] == [
        tuple(greedy_reference(b"0123456789", 1))
    ]
    room.execution.abort()


def test_who_ends_with_its_first_token_leaves_with_its_prefill(room: Room) -> None:
    room.prefill(FOUNDER)
    joiner = room.admit(ask("one", 1))
    result = room.prefill(joiner)
    ((ref, done),) = result.finished
    assert ref == joiner
    assert (done.request_id, done.original_index) == (2, 1)
    assert done.finish_reason is FinishReason.LENGTH
    assert [delta.token_ids for ref, delta in result.deltas if ref == joiner] == [done.token_ids]
    assert room.stepper.residents() == [FOUNDER]
    with pytest.raises(ExecutionError, match="no resident is"):
        room.execution.channel(joiner)


def test_a_prompt_that_is_only_scored_leaves_with_its_prefill(room: Room) -> None:
    room.prefill(FOUNDER)
    joiner = room.admit(ask("score", 0, prompt_logprobs=1))
    result = room.prefill(joiner)
    ((_, done),) = result.finished
    assert done.token_ids == ()
    assert done.prompt_logprobs is not None
    assert len(done.prompt_logprobs) == 5
    assert result.execution[0].select_last_token_logits is False
    ((_, delta),) = result.deltas
    assert delta.prompt_logprobs == done.prompt_logprobs


def test_a_slot_is_taken_again_under_another_name() -> None:
    room = Room(ask("a", 2))
    room.prefill(FOUNDER)
    b = room.admit(ask("b", 6), 1)
    room.prefill(b)
    result = room.decode()
    assert [ref for ref, _ in result.finished] == [FOUNDER]
    c = room.admit(ask("c", 6), 2)
    assert (b, c) == (JOINER, ResidentRef(0, 2))
    assert room.stepper.residents() == [b, c]
    refused(room, "no resident is", ImmutableStepBatch(decodes=(DecodeEntry(FOUNDER),)))
    room.prefill(c)
    result = room.decode()
    assert [ref for ref, _ in result.deltas] == [b, c]
    room.execution.abort()
    assert_clean(room.runtime)


# ---- admission -----------------------------------------------------------------------------------


def test_an_intent_needs_a_request(room: Room) -> None:
    intent = room.execution.build_intent(ask("x"), 1, 2)
    before = room.state()
    with pytest.raises(ExecutionError, match="needs a request id"):
        room.stepper.admit(AdmissionIntent(0, intent.seed))
    assert room.state() == before


def test_an_index_joins_once(room: Room) -> None:
    before = room.state()
    with pytest.raises(ExecutionError, match="index 0 is seated already"):
        room.stepper.admit(room.execution.build_intent(ask("x"), 0, 2))
    assert room.state() == before


@pytest.mark.parametrize("sizes", [{"max_batch_size": 1}, {"pages": 3}])
def test_no_capacity_changes_nothing(sizes: dict[str, int]) -> None:
    room = Room(ask("founder", 9), **sizes)
    room.prefill(FOUNDER)
    before = room.state()
    result = room.execution.admit(ask("joiner", 9), 1, 2)
    assert (result.status, result.ref) == (AdmissionStatus.NO_CAPACITY, None)
    assert "no seat or no pages" in result.reason
    assert room.state() == before
    # The refused admission is not pending.
    room.decode()
    room.execution.abort()
    assert_clean(room.runtime)


# ---- the mixed step ------------------------------------------------------------------------------


def test_decodes_and_chunks_of_several_residents_are_one_pass(room: Room) -> None:
    room.prefill(FOUNDER)
    first, second = room.admit(ask("0123456789", 6), 1), room.admit(ask("abcdef", 6), 2)
    result = room.stepper.step(
        ImmutableStepBatch(
            decodes=(DecodeEntry(FOUNDER),),
            prefills=(PrefillEntry(first, 4), PrefillEntry(second, 6)),
        )
    )
    assert result.work is SequenceWork.MIXED
    assert room.backend.steps[-1] == [1, 4, 6]
    assert [
        (one.identity.ref, one.work, one.query_length, one.past_length) for one in result.execution
    ] == [
        (FOUNDER, SequenceWork.DECODE, 1, 7),
        (first, SequenceWork.CONTEXT, 4, 0),
        (second, SequenceWork.CONTEXT, 6, 0),
    ]
    assert [one.select_last_token_logits for one in result.execution] == [True, False, True]
    # The unfinished prompt gained nothing.
    assert [(ref, delta.token_ids) for ref, delta in result.deltas] == [
        (FOUNDER, tuple(greedy_reference(b"founder", 2)[1:])),
        (second, tuple(greedy_reference(b"abcdef", 1))),
    ]
    result = room.stepper.step(ImmutableStepBatch(prefills=(PrefillEntry(first, 6),)))
    assert result.work is SequenceWork.CONTEXT
    assert [(ref, delta.token_ids) for ref, delta in result.deltas] == [
        (first, tuple(greedy_reference(b"0123456789", 1)))
    ]
    # Nobody has to be named: the others wait.
    result = room.stepper.step(ImmutableStepBatch(decodes=(DecodeEntry(second),)))
    assert result.work is SequenceWork.DECODE
    assert [ref for ref, _ in result.deltas] == [second]
    room.decode()


def test_the_order_of_a_batch_is_the_order_of_the_pass(room: Room) -> None:
    room.prefill(FOUNDER)
    joiner = room.admit(ask("join", 6))
    room.prefill(joiner)
    result = room.stepper.step(
        ImmutableStepBatch(decodes=(DecodeEntry(joiner), DecodeEntry(FOUNDER)))
    )
    assert [one.ref for one in result.participants] == [joiner, FOUNDER]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (ImmutableStepBatch(decodes=(DecodeEntry(NOBODY),)), "no resident is"),
        (ImmutableStepBatch(prefills=(PrefillEntry(NOBODY, 1),)), "no resident is"),
        (ImmutableStepBatch(retire=((NOBODY, FinishReason.CANCELLED),)), "no resident is"),
        (ImmutableStepBatch(preempt=(NOBODY,)), "no resident is"),
        (
            ImmutableStepBatch(
                retire=((FOUNDER, FinishReason.CANCELLED),), decodes=(DecodeEntry(NOBODY),)
            ),
            "no resident is",
        ),
        (
            ImmutableStepBatch(preempt=(FOUNDER,), prefills=(PrefillEntry(JOINER, 99),)),
            "no 99 prompt tokens left",
        ),
        (ImmutableStepBatch(decodes=(DecodeEntry(JOINER),)), "decodes before its prompt has run"),
        (ImmutableStepBatch(prefills=(PrefillEntry(JOINER, 5),)), "no 5 prompt tokens left"),
        (ImmutableStepBatch(prefills=(PrefillEntry(JOINER, 0),)), "no 0 prompt tokens left"),
        (ImmutableStepBatch(prefills=(PrefillEntry(FOUNDER, 1),)), "no 1 prompt tokens left"),
        (ImmutableStepBatch(decodes=(DecodeEntry(FOUNDER, 2),)), "cannot decode 2 tokens"),
        (ImmutableStepBatch(decodes=(DecodeEntry(FOUNDER, 0),)), "cannot decode 0 tokens"),
        (ImmutableStepBatch(decodes=(DecodeEntry(FOUNDER),) * 2), "once at most"),
        (ImmutableStepBatch(prefills=(PrefillEntry(JOINER, 1),) * 2), "once at most"),
        (
            ImmutableStepBatch(
                retire=((FOUNDER, FinishReason.CANCELLED),), decodes=(DecodeEntry(FOUNDER),)
            ),
            "once at most",
        ),
        (ImmutableStepBatch(preempt=(JOINER, JOINER)), "once at most"),
    ],
)
def test_an_impossible_step_is_refused_before_anything_of_it_happens(
    room: Room, batch: ImmutableStepBatch, message: str
) -> None:
    room.prefill(FOUNDER)
    assert room.admit(ask("join", 6)) == JOINER
    refused(room, message, batch)
    # And the batch goes on as if it had not been asked.
    room.prefill(JOINER)
    assert [ref for ref, _ in room.decode().deltas] == [FOUNDER, JOINER]


def test_an_empty_step_does_nothing(room: Room) -> None:
    result = room.stepper.step(ImmutableStepBatch())
    assert (result.ok, result.deltas, result.finished, result.participants) == (True, (), (), ())
    assert room.backend.launches == 0


@pytest.mark.parametrize(
    "reason", [FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.LENGTH]
)
def test_a_retired_resident_leaves_with_the_reason_given(room: Room, reason: FinishReason) -> None:
    room.prefill(FOUNDER)
    joiner = room.admit(ask("join", 6))
    room.prefill(joiner)
    result = room.stepper.step(
        ImmutableStepBatch(retire=((joiner, reason),), decodes=(DecodeEntry(FOUNDER),))
    )
    ((ref, done),) = result.finished
    assert (ref, done.finish_reason) == (joiner, reason)
    assert done.token_ids == tuple(greedy_reference(b"join", 1))
    assert [ref for ref, _ in result.deltas] == [FOUNDER]
    assert room.stepper.residents() == [FOUNDER]
    assert room.backend.steps[-1] == [1]


def test_a_resident_may_retire_before_its_prompt_has_run(room: Room) -> None:
    joiner = room.admit(ask("join", 6))
    room.stepper.step(ImmutableStepBatch(prefills=(PrefillEntry(joiner, 2),)))
    result = room.stepper.step(ImmutableStepBatch(retire=((joiner, FinishReason.CANCELLED),)))
    ((_, done),) = result.finished
    assert (done.token_ids, done.text) == ((), "")
    # It was the last admitted; the founder's prompt may run now.
    room.prefill(FOUNDER)


def test_a_preempted_resident_goes_on_where_it_stood(room: Room) -> None:
    room.prefill(FOUNDER)
    joiner = room.admit(ask("join", 6, logprobs=1, prompt_logprobs=1))
    room.prefill(joiner)
    room.decode()
    free = room.runtime.pool.free_pages
    result = room.stepper.step(
        ImmutableStepBatch(preempt=(joiner,), decodes=(DecodeEntry(FOUNDER),))
    )
    ((ref, seed),) = result.preempted
    assert ref == joiner
    assert result.finished == ()
    assert seed.generated == tuple(greedy_reference(b"join", 2))
    assert room.runtime.pool.free_pages > free
    assert room.stepper.residents() == [FOUNDER]

    back = room.execution.admit(ask("unused"), 7, 2, resume=seed)
    assert back.ref == ResidentRef(1, 2)
    snapshot = room.stepper.snapshot()
    assert [need.prefill_remaining for need in snapshot.residents] == [0, 6]
    steps = [
        room.stepper.step(
            ImmutableStepBatch(
                decodes=(DecodeEntry(FOUNDER),), prefills=(PrefillEntry(back.ref, 6),)
            )
        )
    ]
    while back.ref in room.stepper.residents():
        steps.append(room.decode())
    finished = {ref: done for step in steps for ref, done in step.finished}
    done = finished[back.ref]
    alone, _ = fake_runtime()
    expected = alone.handle_request(ask("join", 6, logprobs=1, prompt_logprobs=1))
    assert expected is not None
    assert done.token_ids == expected.token_ids
    assert done.text == expected.text
    assert done.logprobs == expected.logprobs
    assert done.prompt_logprobs == expected.outputs[0].prompt_logprobs
    assert done.original_index == 7
    # What was said before the preemption is not said again.
    said = [delta for step in steps for ref, delta in step.deltas if ref == back.ref]
    assert [token for delta in said for token in delta.token_ids] == list(done.token_ids[2:])
    assert all(delta.prompt_logprobs is None for delta in said)


def test_a_step_without_pages_is_an_error_and_preempting_makes_room() -> None:
    room = Room(ask("founder", None), pages=4)
    room.execution.abort()
    room.runtime.overcommit = True
    execution = SteppedRequest.begin(room.runtime, ask("founder", 20), 1)
    assert execution is not None
    room.execution = execution
    room.prefill(room.stepper.residents()[0])
    joiner = room.admit(ask("joiner", 20))
    room.prefill(joiner)
    founder = room.stepper.residents()[0]
    while room.stepper.snapshot().free_pages or room.stepper.snapshot().residents[0].room:
        room.decode()
    refs = room.stepper.residents()
    with pytest.raises(ExecutionError, match="no page is free"):
        room.stepper.step(ImmutableStepBatch(decodes=tuple(map(DecodeEntry, refs))))
    need = room.stepper.snapshot().residents[1]
    result = room.stepper.step(
        ImmutableStepBatch(preempt=(joiner,), decodes=(DecodeEntry(founder),))
    )
    assert [ref for ref, _ in result.deltas] == [founder]
    assert room.runtime.pool.free_pages == need.pages - 1
    room.execution.abort()
    assert_clean(room.runtime)


def test_a_row_that_nothing_may_follow_ends_its_resident_alone(room: Room) -> None:
    room.prefill(FOUNDER)
    hopeless = room.admit(ask("x", 3, min_tokens=1, stop_token_ids=range(VOCAB)))
    result = room.stepper.step(
        ImmutableStepBatch(decodes=(DecodeEntry(FOUNDER),), prefills=(PrefillEntry(hopeless, 1),))
    )
    ((ref, done),) = result.finished
    assert (ref, done.finish_reason) == (hopeless, FinishReason.ERROR)
    assert done.error is not None
    assert [ref for ref, _ in result.deltas] == [FOUNDER]
    room.decode()


# ---- what a planner sees -------------------------------------------------------------------------


def test_a_snapshot_says_what_everybody_needs_next() -> None:
    room = Room(ask("founder", 6), pages=10, page_size=8)
    room.prefill(FOUNDER)
    joiner = room.admit(ask("0123456789", 30))
    room.stepper.step(ImmutableStepBatch(prefills=(PrefillEntry(joiner, 4),)))
    snapshot = room.stepper.snapshot()
    assert (snapshot.page_size, snapshot.free_pages) == (8, 10 - 2 - 5)
    assert snapshot.residents == (
        ResidentNeed(FOUNDER, 0, 1, 16 - 7, 2),
        ResidentNeed(joiner, 6, 1, 40 - 4, 5),
    )
    room.execution.abort()


def test_a_stepper_is_not_copied(room: Room) -> None:
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        copy.copy(room.stepper)
