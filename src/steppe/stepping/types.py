"""The vocabulary of a step: who is resident, what a step runs, what it did (seed 001).

Everything is an immutable value. A ``StepResult`` is the single commit unit: all of it happened
together and nothing outside it happened. References stay valid while their resident lives; a slot's
next occupant has another epoch. What is made for every resident in every step, and hardly read, is
a named tuple: a frozen dataclass takes three times as long to make, and less to read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from steppe.request import (
        CacheCommit,
        CacheLookup,
        FinishReason,
        SamplingParams,
        TokenLogprob,
    )
    from steppe.streaming import StreamChannel

__all__ = [
    "AdmissionIntent",
    "AdmissionResult",
    "AdmissionStatus",
    "BatchResult",
    "DecodeEntry",
    "ExecutionSnapshot",
    "ImmutableDecodeBatch",
    "ImmutablePrefillBatch",
    "ImmutableStepBatch",
    "PrefillEntry",
    "RequestId",
    "ResidentNeed",
    "ResidentRef",
    "ScheduledSequence",
    "ScheduledSequenceDescriptor",
    "ScheduledStep",
    "SequenceIdentity",
    "SequenceWork",
    "SlotSeed",
    "StepId",
    "StepResult",
    "TokenDelta",
]

RequestId = int
"""Engine-wide identity, from 1 upwards, never reused; 0 is no request."""
StepId = int


@dataclass(frozen=True, slots=True, order=True)
class ResidentRef:
    """A seat and which of its occupants is meant. ``slot`` -1 and ``epoch`` 0 name nobody."""

    slot: int = -1
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class SequenceIdentity:
    """Who a sequence is, logically and physically."""

    request_id: RequestId
    ref: ResidentRef


class SequenceWork(Enum):
    """What a step does: prompt tokens, one more token each, or (beyond the seed) both."""

    CONTEXT = "context"
    DECODE = "decode"
    MIXED = "mixed"


class ScheduledSequenceDescriptor(NamedTuple):
    """One sequence's part in a step without its tokens: what ranks compare."""

    identity: SequenceIdentity
    work: SequenceWork
    query_length: int
    past_length: int
    select_last_token_logits: bool = True


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part in a step: ``query_length`` tokens after ``past_length`` known ones."""

    identity: SequenceIdentity
    work: SequenceWork
    query_length: int
    past_length: int
    token_ids: tuple[int, ...]
    select_last_token_logits: bool = True

    @property
    def descriptor(self) -> ScheduledSequenceDescriptor:
        """This, without the tokens."""
        return ScheduledSequenceDescriptor(
            self.identity,
            self.work,
            self.query_length,
            self.past_length,
            self.select_last_token_logits,
        )


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The runtime's own plan of one step, in execution order."""

    id: StepId
    sequences: tuple[ScheduledSequence, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SlotSeed:
    """Everything about one sequence that a runtime needs to seat it.

    ``seed`` and ``max_tokens`` are resolved: no draw and no limit is decided later.
    ``stop_token_ids`` is the whole set that ends this sequence (the model's and the request's; only
    the latter under ``ignore_eos``). A seed that resumes a preempted sequence carries ``generated``
    and what was derived from it: ``logprobs``, ``prompt_logprobs``, and ``text_state``, the
    runtime's own copy of the detokenizer and stop matcher, opaque here; ``cached_tokens`` of its
    prompt were reused when it was first seated. ``embed`` runs the prompt for its embedding and
    generates nothing. ``cache_lookup``, ``cache_commit`` and ``cache_salt`` are the request's;
    ``page_chain`` is the runtime's own, the keys of the pages so far.
    """

    request_id: RequestId
    original_index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    sequence_index: int = 0
    stream_channel: StreamChannel | None = None
    generated: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    text_state: object = None
    embed: bool = False
    cache_lookup: CacheLookup = "use"
    cache_commit: CacheCommit = "all"
    cache_salt: str = ""
    page_chain: object = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AdmissionIntent:
    """All that validation, templating and tokenization produce. Dropping one changes nothing
    anywhere.
    """

    request_id: RequestId
    seed: SlotSeed


class AdmissionStatus(Enum):
    """How an admission ended. Only ADMITTED changed anything."""

    ADMITTED = "admitted"
    NO_CAPACITY = "no_capacity"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """``ref`` is set iff ADMITTED; ``reason`` says why not otherwise. NO_CAPACITY is worth another
    try.
    """

    status: AdmissionStatus = AdmissionStatus.REJECTED
    ref: ResidentRef | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ImmutablePrefillBatch:
    """Seed 001: run the whole prompt of one newly admitted resident."""

    target: ResidentRef


@dataclass(frozen=True, slots=True)
class ImmutableDecodeBatch:
    """Seed 001: one decode step. Names every live resident, in execution order."""

    residents: tuple[ResidentRef, ...]


@dataclass(frozen=True, slots=True)
class DecodeEntry:
    """A resident that decodes; ``query_length`` above 1 also verifies draft tokens."""

    ref: ResidentRef
    query_length: int = 1


@dataclass(frozen=True, slots=True)
class PrefillEntry:
    """The next ``num_tokens`` prompt tokens of a resident."""

    ref: ResidentRef
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ImmutableStepBatch:
    """Beyond the seed: all a step does, in order: retire, preempt, then one ragged pass over
    decodes and prefills.
    """

    decodes: tuple[DecodeEntry, ...] = ()
    prefills: tuple[PrefillEntry, ...] = ()
    retire: tuple[tuple[ResidentRef, FinishReason], ...] = ()
    preempt: tuple[ResidentRef, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one resident gained in one step. ``text`` may lag behind or run ahead of ``token_ids``.

    ``prompt_logprobs`` of the prompt positions scored in this step.
    """

    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Snapshot of a finished sequence, whole. ``error`` says why ``finish_reason`` is ERROR."""

    request_id: RequestId
    original_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    draft_proposed: int = 0
    draft_accepted: int = 0
    error: str | None = None
    embedding: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one executed step did, all of it. A finished resident's last delta is here beside its
    snapshot.
    """

    ok: bool = False
    work: SequenceWork = SequenceWork.CONTEXT
    step_id: StepId = 0
    participants: tuple[SequenceIdentity, ...] = ()
    execution: tuple[ScheduledSequenceDescriptor, ...] = ()
    deltas: tuple[tuple[ResidentRef, TokenDelta], ...] = ()
    finished: tuple[tuple[ResidentRef, BatchResult], ...] = ()
    preempted: tuple[tuple[ResidentRef, SlotSeed], ...] = ()
    published_prefix: bool = False


class ResidentNeed(NamedTuple):
    """What one resident would take next. Token and page counts.

    ``prefill_remaining`` prompt tokens are not computed yet (0: it decodes). ``decode_tokens`` is
    the query length of its next decode. It holds room for ``room`` more tokens before it needs
    another page (in each cache group). Preempting it gives ``pages`` back at least: those that
    nobody shares; 0 when that is not known. ``follows`` says that an earlier resident is computing
    what this one's prompt begins with: it will cost nothing to whoever waits for it.
    """

    ref: ResidentRef
    prefill_remaining: int
    decode_tokens: int = 1
    room: int = 0
    pages: int = 0
    follows: bool = False


@dataclass(frozen=True, slots=True)
class ExecutionSnapshot:
    """The memory side of what a planner decides on. ``free_pages`` is the scarcest group's, cached
    pages that nobody holds among them.
    """

    page_size: int
    free_pages: int
    residents: tuple[ResidentNeed, ...] = field(default=())
