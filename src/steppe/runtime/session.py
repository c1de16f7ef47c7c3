"""One generation, advanced a step at a time (seed 002, ``GenerationSession``)."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NoReturn

from steppe.errors import ExecutionError, InvalidRequestError
from steppe.request import FinishReason, LLMGenerationRequest, LLMGenerationResponse
from steppe.runtime.boundary import AdmitDecision, GenerationBoundary, SessionStep
from steppe.runtime.executor import SequenceRows, StepOutcome
from steppe.runtime.responses import to_response
from steppe.runtime.sequence import unseated_result
from steppe.stepping.types import BatchResult, ResidentRef, SlotSeed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from steppe.runtime.context import DecodingInferenceContext
    from steppe.runtime.decoding.strategy import DecodingKvHeadroom, DecodingStrategy
    from steppe.runtime.generation import StreamChannelFinalizer
    from steppe.runtime.kv.managed import ManagedKVCacheRequest
    from steppe.runtime.rank_runtime import LLMRankRuntime
    from steppe.runtime.sequence import SequenceState

__all__ = ["GenerationSession"]


class GenerationSession(GenerationBoundary):
    """The residents of one generation and the steps over them. Actor thread only.

    Two ways to drive it. The blocking one is the seed's: ``prime_from_prefill`` once, then
    ``advance`` until ``finished``; it polls the channels' cancel flags between steps, seats waiting
    founders when room appears and preempts the newest when the pool runs dry. The stepped one
    (``RuntimeStepper``) decides all of that outside and calls ``seat``, ``retire``, ``preempt`` and
    ``run``.
    """

    def __init__(
        self,
        runtime: LLMRankRuntime,
        context: DecodingInferenceContext,
        strategy: DecodingStrategy,
        managed_request: ManagedKVCacheRequest,
        request: LLMGenerationRequest,
        kv_headroom: DecodingKvHeadroom,
        *,
        boundary_scheduling_active: bool = False,
        stream_finalizer: StreamChannelFinalizer | None = None,
    ) -> None:
        self._runtime = runtime
        self._context = context
        self._strategy = strategy
        self._managed = managed_request
        self.request = request
        self._headroom = kv_headroom
        self._polls_cancel = boundary_scheduling_active or any(
            one.stream_channel is not None for one in (request, *request.requests)
        )
        self._stream_finalizer = stream_finalizer
        self._num_founders = len(request.sequences())
        self._waiting: deque[SlotSeed] = deque()
        self._unprimed: list[StepOutcome] = []
        self._completed: dict[int, BatchResult] = {}
        self.last_step = SessionStep()

    # ---- seating ----------------------------------------------------------------------------

    def found(self, seeds: Iterable[SlotSeed]) -> None:
        """Take the founding sequences, in order; those without room now wait for it."""
        self._waiting.extend(seeds)
        self._seat_waiting()

    def seat(self, seed: SlotSeed) -> SequenceState | None:
        """Seat a sequence without running anything; None, and nothing changed, without room."""
        sequence = self._context.seat(seed, self._runtime.reservation(seed))
        if sequence is not None:
            self._runtime.prefill_metrics.reused_tokens += sequence.computed
        return sequence

    def admit_sequence(self, seed: SlotSeed) -> AdmitDecision:
        index = seed.original_index
        if (
            index < self._num_founders
            or index in self._completed
            or any(index == other.original_index for other in self._waiting)
        ):
            raise ExecutionError(f"index {index} belongs to somebody else")
        channel = seed.stream_channel
        if channel is not None and (channel.attached or channel.finished):
            raise InvalidRequestError("stream_channel", "a channel serves one request")
        # Its prompt runs with the next step, beside the decodes of the others.
        if self.seat(seed) is None:
            return AdmitDecision.NO_CAPACITY
        if channel is not None:
            channel.attach()
            if self._stream_finalizer is not None:
                self._stream_finalizer.add(channel)
        return AdmitDecision.ADMITTED

    def admit_request(
        self, request: LLMGenerationRequest, original_index: int, request_id: int
    ) -> AdmitDecision:
        if request.requests or request.params.n != 1:
            raise InvalidRequestError("requests", "only a single sequence can join a batch")
        return self.admit_sequence(
            self._runtime.preparation.seed(request, original_index, request_id)
        )

    def _seat_waiting(self) -> None:
        while self._waiting and self.seat(self._waiting[0]) is not None:
            self._waiting.popleft()

    # ---- the blocking loop ------------------------------------------------------------------

    def prefill_founders(self, outputs: tuple[str, ...] = ()) -> list[StepOutcome]:
        """Compute the seated founders' prompts. Their first tokens stay back for the priming."""
        outcomes = []
        while any(sequence.prefilling for sequence in self._context.residents):
            parts = self._prefill_parts(self._runtime.max_step_tokens)
            outcome = self._execute(parts, outputs)
            self._advance_computed(outcome)
            self._commit_pages(outcome)
            self._unprimed.append(outcome)
            outcomes.append(outcome)
        return outcomes

    def prime_from_prefill(self) -> bool:
        """Consume the tokens the founding prefill produced. Once, before the first ``advance``.

        Returns whether it produced any.
        """
        outcomes, self._unprimed = self._unprimed, []
        for outcome in outcomes:
            self._absorb(outcome)
        self.last_step = self._poll_cancelled() + self._leave()
        return bool(outcomes)

    @property
    def finished(self) -> bool:
        """True once nobody is seated and nobody waits for a seat."""
        return not self._context.residents and not self._waiting

    def advance(self) -> bool:
        """One step for every live sequence: prompts in chunks, all others one decode.

        ``last_step`` says what it did. Returns False when there was nothing to do. Raises
        ExecutionError when the step fails; the generation cannot go on then.
        """
        if self._unprimed:
            raise ExecutionError("the tokens of the founding prefill come before any step")
        if self.finished:
            self.last_step = SessionStep()
            return False
        gone = self._poll_cancelled() + self._leave()
        if not (self._context.residents or self._waiting):
            self.last_step = gone
            return True
        self._seat_waiting()
        self._make_room()
        budget = self._runtime.max_step_tokens
        parts = [
            self.decode_part(sequence, self._strategy.query_length(sequence))
            for sequence in self._context.residents
            if not sequence.prefilling
        ]
        parts += self._prefill_parts(max(1, budget - sum(len(part.token_ids) for part in parts)))
        self.last_step = gone + self.run(parts)
        return True

    def _prefill_parts(self, budget: int) -> list[SequenceRows]:
        parts = []
        following = self.following()
        for sequence in self._context.residents:
            if sequence.prefilling and budget > 0 and sequence.ref.slot not in following:
                count = min(budget, sequence.prefill_end - sequence.computed)
                parts.append(self.prefill_part(sequence, count))
                budget -= count
        return parts

    def _poll_cancelled(self) -> SessionStep:
        if not self._polls_cancel:
            return SessionStep()
        gone = []
        for sequence in self._context.residents:
            channel = sequence.seed.stream_channel
            if channel is not None and channel.cancelled:
                sequence.end(FinishReason.CANCELLED)
        for seed in tuple(self._waiting):
            if seed.stream_channel is not None and seed.stream_channel.cancelled:
                self._waiting.remove(seed)
                result = unseated_result(seed, FinishReason.CANCELLED)
                self._completed[seed.original_index] = result
                gone.append((ResidentRef(), seed, result))
        return SessionStep(finished=tuple(gone))

    def _make_room(self) -> None:
        """Grow every lease for the next step, oldest first; preempt the newest when pages lack."""
        residents = self._context.residents
        if not residents:
            raise ExecutionError("a waiting sequence does not fit an empty page pool")
        index = 0
        while index < len(residents):
            sequence = residents[index]
            if self.grow(sequence, self.next_tokens(sequence)):
                index += 1
                continue
            if len(residents) == 1:
                raise ExecutionError(
                    f"a lone sequence of {len(sequence.tokens)} tokens does not fit the page pool"
                )
            self._waiting.appendleft(self.preempt(residents[-1]))

    # ---- steps ------------------------------------------------------------------------------

    def next_tokens(self, sequence: SequenceState) -> int:
        """Query tokens of a sequence's next decode; of a prefilling one, the rest of its prompt."""
        if (left := sequence.prefill_end - sequence.computed) > 0:
            return left
        return self._strategy.query_length(sequence)

    def grow(self, sequence: SequenceState, query_length: int) -> bool:
        """Hold cache room for that many more tokens. False, and nothing changed, if pages lack."""
        return sequence.lease.grow(sequence.computed + query_length + self._headroom.draft)

    def prefill_part(self, sequence: SequenceState, num_tokens: int) -> SequenceRows:
        """A sequence's next ``num_tokens`` known tokens; the last chunk samples."""
        start = sequence.computed
        end = start + num_tokens
        scored: tuple[int, ...] = ()
        if sequence.prompt_logprobs is not None:
            first = max(start, len(sequence.prompt_logprobs) - 1)
            last = min(end, sequence.num_prompt - 1)
            scored = tuple(range(first - start, last - start))
        last_row = (num_tokens - 1,) if end == sequence.prefill_end else ()
        pooled: tuple[int, ...] = ()
        if sequence.seed.embed:
            mean = self._runtime.artifacts.pooling == "mean"
            pooled = tuple(range(num_tokens)) if mean else last_row
        return SequenceRows(
            sequence,
            tuple(sequence.tokens[start:end]),
            scored,
            last_row if sequence.samples_after_prefill else (),
            pooled=pooled,
        )

    def decode_part(self, sequence: SequenceState, query_length: int) -> SequenceRows:
        """A sequence's next decode."""
        rows = self._strategy.rows(sequence, query_length)
        return SequenceRows(sequence, rows.token_ids, (), rows.sampled, rows)

    def run(self, parts: Sequence[SequenceRows]) -> SessionStep:
        """Execute one ragged pass, take its effects, and let the finished leave.

        Raises ExecutionError; no sequence has changed then.
        """
        outcome = self._execute(parts)
        self._advance_computed(outcome)
        self._absorb(outcome)
        published = self._commit_pages(outcome)
        return self._leave(published=published)

    def _execute(self, parts: Sequence[SequenceRows], outputs: tuple[str, ...] = ()) -> StepOutcome:
        execute, cache = self._runtime.executor.execute, self._managed.cache
        if not cache.spills:
            return execute(parts, outputs)
        began = time.perf_counter()
        outcome = execute(parts, outputs)
        cache.cost.computed(sum(len(part.token_ids) for part in parts), time.perf_counter() - began)
        return outcome

    def retire(self, sequence: SequenceState, reason: FinishReason) -> None:
        """End a sequence from outside; it leaves with the step that follows."""
        sequence.end(reason)

    def leave(self) -> SessionStep:
        """Let everybody who has ended leave, without running a pass."""
        return self._leave()

    def preempt(self, sequence: SequenceState) -> SlotSeed:
        """Take a sequence's seat and pages away; the seed resumes it."""
        self._strategy.on_evict(sequence)
        self._context.unseat(sequence)
        return sequence.preempted_seed()

    def _advance_computed(self, outcome: StepOutcome) -> None:
        """Count prompt tokens as computed and take their scores."""
        metrics = self._runtime.prefill_metrics
        for index, part in enumerate(outcome.parts):
            if part.decode is not None:
                continue
            sequence = part.sequence
            sequence.computed += len(part.token_ids)
            metrics.computed_tokens += len(part.token_ids)
            metrics.total_runs += not sequence.prefilling
            for score in outcome.scores(index):
                sequence.score(score)
            if part.pooled:
                sequence.pool(outcome.hidden_states(index))
            if not sequence.prefilling and not sequence.samples_after_prefill:
                sequence.end(FinishReason.STOP if sequence.seed.embed else FinishReason.LENGTH)

    def _absorb(self, outcome: StepOutcome) -> None:
        """Give every sequence the tokens sampled for it."""
        generated = 0
        accept = self._strategy.accept
        for index, (sequence, _, _, rows, decode, _) in enumerate(outcome.parts):
            if not rows:
                continue
            sampled, logprobs = outcome.samples(index)
            if min(sampled) < 0:
                sequence.starve()
                continue
            if decode is None:
                sequence.append(sampled[0], logprobs[0])
                generated += 1
                continue
            tokens, computed, proposed, accepted = accept(sequence, decode, sampled)
            sequence.computed += computed
            sequence.draft_proposed += proposed
            sequence.draft_accepted += accepted
            for row, token in tokens:
                if sequence.finish_reason is not None:
                    break
                sequence.append(token, logprobs[row])
                generated += 1
        metrics = self._runtime.generation_metrics
        metrics.generated_tokens += generated
        metrics.total_steps += generated > 0

    def _commit_pages(self, outcome: StepOutcome) -> bool:
        """Publish the pages that a step filled, and let those who follow take them. Whether there
        were any.
        """
        cache = self._managed.cache
        published = False
        for part in outcome.parts:
            if part.sequence.computed >= part.sequence.boundary:
                published |= cache.commit(part.sequence)
        if published:
            for sequence in self._context.residents:
                if sequence.prefilling:
                    self._runtime.prefill_metrics.reused_tokens += cache.adopt(sequence)
        return published

    def following(self) -> set[int]:
        """Slots of the residents whose prompt begins with what an earlier one is computing."""
        return self._managed.cache.followers(self._context.residents)

    def _leave(self, *, published: bool = False) -> SessionStep:
        deltas = []
        finished = []
        for sequence in tuple(self._context.residents):
            delta = sequence.take_delta()
            if delta is not None:
                deltas.append((sequence.ref, sequence.seed, delta))
            if sequence.finish_reason is not None:
                self._strategy.on_evict(sequence)
                self._context.unseat(sequence)
                result = sequence.result()
                self._completed[result.original_index] = result
                finished.append((sequence.ref, sequence.seed, result))
        return SessionStep(tuple(deltas), tuple(finished), published)

    # ---- what leaves ------------------------------------------------------------------------

    def take_completed_at_or_above(self, first_index: int) -> dict[int, BatchResult]:
        if not self._completed:
            return {}
        taken = {index: done for index, done in self._completed.items() if index >= first_index}
        for index in taken:
            del self._completed[index]
        return taken

    def materialize_result(
        self, result: BatchResult, stop_strings: Sequence[str] = ()
    ) -> LLMGenerationResponse:
        # The text is cut at its stop string already: the session matched it as it was generated.
        return to_response([result])

    @property
    def resident_count(self) -> int:
        return len(self._context.residents)

    @property
    def residents(self) -> Sequence[SequenceState]:
        """Seated sequences in execution order."""
        return self._context.residents

    def find(self, ref: ResidentRef) -> SequenceState:
        """The resident a reference names; ExecutionError for a stale one."""
        return self._context.find(ref)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a generation session can be neither copied nor pickled")

    def close(self) -> None:
        """Unseat everybody and forget the waiting. Idempotent."""
        self._waiting.clear()
        self._unprimed.clear()
        try:
            for sequence in self._context.residents:
                self._strategy.on_evict(sequence)
        finally:
            self._context.clear()
