"""The typed operations over one session (seed 001, ``RuntimeStepper``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from steppe.errors import ExecutionError
from steppe.runtime.boundary import SessionStep
from steppe.runtime.kv.pool import pages_for
from steppe.stepping.types import (
    AdmissionResult,
    AdmissionStatus,
    ExecutionSnapshot,
    ResidentNeed,
    ResidentRef,
    ScheduledSequenceDescriptor,
    SequenceWork,
    SlotSeed,
    StepResult,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.runtime.executor import SequenceRows
    from steppe.runtime.rank_runtime import LLMRankRuntime
    from steppe.runtime.sequence import SequenceState
    from steppe.runtime.session import GenerationSession
    from steppe.stepping.types import (
        AdmissionIntent,
        ImmutableDecodeBatch,
        ImmutablePrefillBatch,
        ImmutableStepBatch,
    )

__all__ = ["RuntimeStepper"]


class RuntimeStepper:
    """Typed operations over immutable inputs with typed results; nothing mutable crosses. One
    thread, the session's.

    A result holds all that its operation did. When an operation raises ExecutionError the session
    is over: nothing of it may be delivered.
    """

    def __init__(self, runtime: LLMRankRuntime, session: GenerationSession) -> None:
        self._runtime = runtime
        self._session = session
        self._num_founders = len(session.request.sequences())
        self._pending: ResidentRef | None = None
        self._next_step = 1

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stepper can be neither copied nor pickled")

    def residents(self) -> list[ResidentRef]:
        """References of every live resident, in execution order."""
        return [sequence.ref for sequence in self._session.residents]

    def admit(self, intent: AdmissionIntent) -> AdmissionResult:
        """Reserve pages and take a seat; the prompt runs with a later operation.

        Anything but ADMITTED has changed nothing. Raises ExecutionError for an intent without a
        request, or one whose index is seated already.
        """
        if intent.request_id == 0:
            raise ExecutionError("an intent needs a request id")
        sequence = self._session.seat(intent.seed)
        if sequence is None:
            return AdmissionResult(AdmissionStatus.NO_CAPACITY, reason="no seat or no pages")
        self._pending = sequence.ref
        return AdmissionResult(AdmissionStatus.ADMITTED, sequence.ref)

    def prefill(self, batch: ImmutablePrefillBatch) -> StepResult:
        """Run the whole prompt of the pending admission, or of a founder when none is pending.

        Raises ExecutionError for another target.
        """
        if self._pending is not None and batch.target != self._pending:
            raise ExecutionError(f"the prefill of {self._pending} comes next, not {batch.target}")
        sequence = self._session.find(batch.target)
        if not sequence.prefilling:
            raise ExecutionError(f"the prompt of {batch.target} has run already")
        done = SessionStep()
        left = sequence.prefill_end - sequence.computed
        # The chunks are the runtime's affair: as a step, the prompt runs whole.
        descriptors = self._descriptors([self._session.prefill_part(sequence, left)])
        while left := sequence.prefill_end - sequence.computed:
            chunk = min(left, self._runtime.max_step_tokens)
            done += self._session.run([self._session.prefill_part(sequence, chunk)])
        self._pending = None
        return self._result(SequenceWork.CONTEXT, descriptors, done)

    def decode(self, batch: ImmutableDecodeBatch) -> StepResult:
        """One decode of everybody. ``batch`` must name all residents, in execution order.

        Raises ExecutionError if it does not, or if somebody's prompt has not run.
        """
        if list(batch.residents) != self.residents():
            raise ExecutionError("a decode names every live resident, in execution order")
        waiting = [one.ref for one in self._session.residents if one.prefilling]
        if waiting:
            raise ExecutionError(f"the prefill of {waiting[0]} comes before any decode")
        parts = []
        for sequence in self._session.residents:
            length = self._session.next_tokens(sequence)
            if not self._session.grow(sequence, length):
                raise _short(sequence)
            parts.append(self._session.decode_part(sequence, length))
        descriptors = self._descriptors(parts)
        return self._result(SequenceWork.DECODE, descriptors, self._session.run(parts))

    def step(self, batch: ImmutableStepBatch) -> StepResult:
        """Retire, preempt, then one ragged pass over decodes and prompt chunks (beyond the seed).

        Raises ExecutionError, and nothing has changed, for a batch that names a stale resident or
        one twice, runs a prompt past its end or decodes before it; and when pages lack.
        """
        session = self._session
        retiring = [(session.find(ref), reason) for ref, reason in batch.retire]
        preempting = [session.find(ref) for ref in batch.preempt]
        running = self._runnable(batch)
        named = {sequence for sequence, _ in (*retiring, *running)}.union(preempting)
        if len(named) < len(retiring) + len(running) + len(preempting):
            raise ExecutionError("a step names every resident once at most")
        for sequence, reason in retiring:
            session.retire(sequence, reason)
        done = session.leave() if retiring else SessionStep()
        preempted = tuple((sequence.ref, session.preempt(sequence)) for sequence in preempting)
        parts = []
        for sequence, length in running:
            if not session.grow(sequence, length):
                raise _short(sequence)
            if sequence.computed < sequence.prefill_end:
                parts.append(session.prefill_part(sequence, length))
            else:
                parts.append(session.decode_part(sequence, length))
        descriptors = self._descriptors(parts)
        if parts:
            done = done + session.run(parts) if retiring else session.run(parts)
        self._pending = None
        work = SequenceWork.MIXED
        if not batch.prefills:
            work = SequenceWork.DECODE
        elif not batch.decodes:
            work = SequenceWork.CONTEXT
        return self._result(work, descriptors, done, preempted)

    def snapshot(self) -> ExecutionSnapshot:
        """Free pages and every resident's next need."""
        pool, session = self._runtime.pool, self._session
        residents, free = session.residents, pool.free_pages
        following = session.following()
        prompts = [max(0, one.prefill_end - one.computed) for one in residents]
        decodes = [
            1 if prompt else session.next_tokens(one)
            for one, prompt in zip(residents, prompts, strict=True)
        ]
        # Nobody is preempted while there is room for everybody, and counting pages takes a while.
        short = free < len(residents) * (pages_for(max(decodes, default=1), pool.page_size) + 1)
        return ExecutionSnapshot(
            pool.page_size,
            free,
            tuple(
                [
                    ResidentNeed(
                        sequence.ref,
                        prompt,
                        decode,
                        sequence.lease.room - sequence.computed,
                        sequence.lease.unshared if short else 0,
                        sequence.ref.slot in following,
                    )
                    for sequence, prompt, decode in zip(residents, prompts, decodes, strict=True)
                ]
            ),
        )

    def _runnable(self, batch: ImmutableStepBatch) -> list[tuple[SequenceState, int]]:
        """Who runs how many tokens: decodes, then prompt chunks."""
        session = self._session
        running = []
        for decode in batch.decodes:
            sequence, length = session.find(decode.ref), decode.query_length
            if sequence.computed < sequence.prefill_end:
                raise ExecutionError(f"{decode.ref} decodes before its prompt has run")
            if not 1 <= length <= session.next_tokens(sequence):
                raise ExecutionError(f"{decode.ref} cannot decode {length} tokens")
            running.append((sequence, length))
        for chunk in batch.prefills:
            sequence = session.find(chunk.ref)
            if not 1 <= chunk.num_tokens <= sequence.prefill_end - sequence.computed:
                raise ExecutionError(f"{chunk.ref} has no {chunk.num_tokens} prompt tokens left")
            running.append((sequence, chunk.num_tokens))
        return running

    def _descriptors(
        self, parts: Sequence[SequenceRows]
    ) -> tuple[ScheduledSequenceDescriptor, ...]:
        context, decode = SequenceWork.CONTEXT, SequenceWork.DECODE
        return tuple(
            [
                ScheduledSequenceDescriptor(
                    sequence.identity,
                    context if rows is None else decode,
                    len(token_ids),
                    sequence.computed,
                    bool(sampled),
                )
                for sequence, token_ids, _, sampled, rows, _ in parts
            ]
        )

    def _result(
        self,
        work: SequenceWork,
        execution: tuple[ScheduledSequenceDescriptor, ...],
        done: SessionStep,
        preempted: tuple[tuple[ResidentRef, SlotSeed], ...] = (),
    ) -> StepResult:
        step_id = self._next_step
        self._next_step += 1
        # Joiners' results leave with their step; only the founders' stay for the final response.
        self._session.take_completed_at_or_above(self._num_founders)
        return StepResult(
            ok=True,
            work=work,
            step_id=step_id,
            participants=tuple([one.identity for one in execution]),
            execution=execution,
            deltas=tuple([(ref, delta) for ref, _, delta in done.deltas]),
            finished=tuple([(ref, result) for ref, _, result in done.finished]),
            preempted=preempted,
            published_prefix=done.published,
        )


def _short(sequence: SequenceState) -> ExecutionError:
    return ExecutionError(f"no page is free for the next step of {sequence.ref}")
