"""One scripted batch: a ``SteppedExecution`` that plays a ``Script``.

Pages are accounted for as a real pool does it, and a batch that breaks a rule of the stepped plane
is an error, so a run under a scripted execution also checks whoever drives it.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from steppe.errors import ExecutionError
from steppe.request import (
    FinishReason,
    LLMGenerationRequest,
    LLMGenerationResponse,
    SequenceOutput,
    TokenLogprob,
    Usage,
)
from steppe.stepping.execution import SteppedExecution
from steppe.stepping.resident_slots import ResidentSlots
from steppe.stepping.script import ScriptedResident, one_token, seed_of, text_of
from steppe.stepping.types import (
    AdmissionResult,
    AdmissionStatus,
    BatchResult,
    ExecutionSnapshot,
    ImmutableStepBatch,
    ResidentNeed,
    ScheduledSequenceDescriptor,
    SequenceIdentity,
    SequenceWork,
    SlotSeed,
    StepResult,
    TokenDelta,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.stepping.simulated import ScriptedRuntime
    from steppe.stepping.types import (
        ImmutableDecodeBatch,
        ImmutablePrefillBatch,
        RequestId,
        ResidentRef,
    )
    from steppe.streaming import StreamChannel

__all__ = ["ScriptedExecution"]

OPEN_ENDED_RESERVE = 256
"""Tokens that a request without a limit reserves beyond its prompt."""


class ScriptedExecution(SteppedExecution):
    """One scripted batch; see ``Script``. Made by a ``ScriptedRuntime``.

    Text is each token id in angle brackets. Log-probabilities, where asked for, are -1 for every
    token. A prompt of text has one token per character.
    """

    def __init__(self, runtime: ScriptedRuntime) -> None:
        self._runtime = runtime
        self._script = runtime.script
        self.mixed_steps = runtime.script.mixed
        self.batch_fields = runtime.script.batch_fields
        self._slots = ResidentSlots(runtime.script.capacity)
        self._residents: dict[int, ScriptedResident] = {}
        self._owed: ResidentRef | None = None
        self._over = False

    # ---- the seed's seven ------------------------------------------------------------------------

    def residents(self) -> Sequence[ResidentRef]:
        return [one.ref for one in self._residents.values()]

    def admit(
        self,
        request: LLMGenerationRequest,
        original_index: int,
        request_id: RequestId,
        *,
        resume: SlotSeed | None = None,
        founding: bool = False,
    ) -> AdmissionResult:
        runtime, script = self._runtime, self._script
        if request_id <= 0 or request.params.n != 1:
            raise ExecutionError("not a sequence of a request")
        if not script.mixed and self._owed is not None:
            raise ExecutionError(f"{self._owed} has not prefilled yet")
        if not founding and not self._residents and resume is None:
            raise ExecutionError("nobody is left to join")
        if any(
            one.seed.request_id == request_id or one.seed.original_index == original_index
            for one in self._residents.values()
        ):
            raise ExecutionError(
                f"request {request_id} or index {original_index} is seated already"
            )
        attempt = runtime.attempts[request_id] = runtime.attempts.get(request_id, 0) + 1
        if not founding and (answer := script.refuse(request_id, attempt)) is not None:
            return answer
        seed = resume or seed_of(request, original_index, request_id, script)
        known = len(seed.prompt_token_ids) + len(seed.generated)
        pages = -(-self._reserve(seed, known) // script.page_size)
        if pages > runtime.free_pages:
            return AdmissionResult(
                AdmissionStatus.NO_CAPACITY,
                reason=f"needs {pages} pages, {runtime.free_pages} are free",
            )
        ref = self._slots.acquire()
        if ref is None:
            return AdmissionResult(AdmissionStatus.NO_CAPACITY, reason="no seat is free")
        if script.cost is not None:
            script.cost.charge_admission(len(seed.prompt_token_ids))
        runtime.free_pages -= pages
        self._residents[ref.slot] = ScriptedResident(
            seed=seed,
            ref=ref,
            request=request,
            generated=list(seed.generated),
            to_prefill=known,
            computed=0,
            pages=pages,
            limit=seed.max_tokens,
            channel=request.stream_channel,
            logprobs=list(seed.logprobs),
        )
        self._owed = ref
        runtime.note("resume" if resume else "found" if founding else "admit", request_id)
        return AdmissionResult(AdmissionStatus.ADMITTED, ref)

    def _reserve(self, seed: SlotSeed, known: int) -> int:
        script = self._script
        if self._runtime.overcommit or script.pages is None:
            return known
        asked = seed.params.max_tokens
        ahead = OPEN_ENDED_RESERVE if asked is None else asked
        total = len(seed.prompt_token_ids) + ahead
        return max(known, min(total, script.context, self._runtime.total_pages * script.page_size))

    def prefill(self, batch: ImmutablePrefillBatch) -> StepResult:
        if self._owed != batch.target:
            raise ExecutionError(f"{self._owed} must prefill now, not {batch.target}")
        self._owed = None
        one = self._at(batch.target)
        return self._execute(
            SequenceWork.CONTEXT, (), ((one, one.to_prefill),), self._cancelled_residents()
        )

    def decode(self, batch: ImmutableDecodeBatch) -> StepResult:
        if self._owed is not None:
            raise ExecutionError(f"{self._owed} must prefill first")
        if list(batch.residents) != list(self.residents()):
            raise ExecutionError("a decode names every resident in order")
        gone = self._cancelled_residents()
        slots = {one.ref.slot for one, _ in gone}
        rows = tuple(
            (one, self._burst(one)) for one in self._residents.values() if one.ref.slot not in slots
        )
        return self._execute(SequenceWork.DECODE, rows, (), gone)

    def materialize(
        self, result: BatchResult, stop_strings: Sequence[str]
    ) -> LLMGenerationResponse:
        output = SequenceOutput(
            0,
            result.text,
            result.token_ids,
            result.finish_reason,
            result.stop_reason,
            result.logprobs,
        )
        usage = Usage(result.prompt_tokens, len(result.token_ids), result.cached_tokens)
        return LLMGenerationResponse((output,), usage)

    def finish(self) -> LLMGenerationResponse | None:
        if self._residents:
            raise ExecutionError("somebody is still resident")
        self._end("finish")
        return None

    def abort(self) -> None:
        for one in list(self._residents.values()):
            self._free(one)
        self._end("abort")

    def _end(self, how: str) -> None:
        if self._over:
            return
        self._over = True
        self._runtime.note(how)
        if self._runtime.execution is self:
            self._runtime.execution = None
            self._runtime.ended += 1

    # ---- beyond ----------------------------------------------------------------------------------

    def snapshot(self) -> ExecutionSnapshot | None:
        if not self.mixed_steps:
            return None
        size = self._script.page_size
        needs = [
            ResidentNeed(
                one.ref,
                one.to_prefill,
                self._burst(one),
                one.pages * size - one.computed,
                one.pages,
            )
            for one in self._residents.values()
        ]
        return ExecutionSnapshot(size, self._runtime.free_pages, tuple(needs))

    def _burst(self, one: ScriptedResident) -> int:
        """The query length of its next decode."""
        if self._script.burst is one_token:
            return 1
        request_id = one.seed.request_id
        return max(1, self._script.burst(request_id, self._runtime.turns.get(request_id, 0)))

    def channel(self, ref: ResidentRef) -> StreamChannel | None:
        return self._at(ref).channel

    def step(self, batch: ImmutableStepBatch) -> StepResult:
        if not self.mixed_steps:
            return super().step(batch)
        leaving = [(self._at(ref), reason) for ref, reason in batch.retire]
        preempted = []
        for ref in batch.preempt:
            one = self._at(ref)
            seed = replace(one.seed, generated=tuple(one.generated), logprobs=tuple(one.logprobs))
            preempted.append((ref, seed))
            self._runtime.note("preempt", one.seed.request_id)
            self._free(one)
        chunks = tuple((self._at(entry.ref), entry.num_tokens) for entry in batch.prefills)
        rows = tuple([(self._at(entry.ref), entry.query_length) for entry in batch.decodes])
        work = SequenceWork.MIXED
        if not chunks:
            work = SequenceWork.DECODE
        elif not rows:
            work = SequenceWork.CONTEXT
        return self._execute(work, rows, chunks, leaving, tuple(preempted))

    # ---- a step ----------------------------------------------------------------------------------

    def _execute(
        self,
        work: SequenceWork,
        rows: tuple[tuple[ScriptedResident, int], ...],
        chunks: tuple[tuple[ScriptedResident, int], ...],
        leaving: list[tuple[ScriptedResident, FinishReason]],
        preempted: tuple[tuple[ResidentRef, SlotSeed], ...] = (),
    ) -> StepResult:
        runtime, script = self._runtime, self._script
        runtime.steps += 1
        runtime.threads.add(threading.get_ident())
        step = runtime.steps
        if runtime.keep_log:
            runtime.note(
                "step",
                tuple(one.seed.request_id for one, _ in rows),
                tuple((one.seed.request_id, tokens) for one, tokens in chunks),
            )
        if step in script.holds:
            script.holds[step].pass_through()
        if step in script.fail_steps:
            raise script.fail_steps[step]
        if script.cost is not None:
            script.cost.charge_step(rows, chunks)
        finished: list[tuple[ResidentRef, BatchResult]] = []
        for one, reason in leaving:
            finished.append((one.ref, self._result(one, reason)))
            self._free(one)
        if step in script.bad_steps:
            return StepResult(ok=False, work=work, step_id=step)
        deltas: list[tuple[ResidentRef, TokenDelta]] = []
        part: list[ScriptedResident] = []
        execution: list[ScheduledSequenceDescriptor] = []
        for one, most in rows:
            if one.to_prefill:
                raise ExecutionError(f"{one.ref} decodes before its prompt is computed")
            if runtime.keep_log:
                part.append(one)
                execution.append(one.descriptor(SequenceWork.DECODE, most))
                count = runtime.decodes.get(one.seed.request_id, 0)
                runtime.decodes[one.seed.request_id] = count + 1
            self._advance(one, most, 0, deltas, finished)
        for one, tokens in chunks:
            if one.ref.slot not in self._residents or not 1 <= tokens <= one.to_prefill:
                raise ExecutionError(f"{one.ref} cannot prefill {tokens} tokens")
            part.append(one)
            execution.append(one.descriptor(SequenceWork.CONTEXT, tokens))
            count = runtime.prompt_tokens.get(one.seed.request_id, 0)
            runtime.prompt_tokens[one.seed.request_id] = count + tokens
            one.to_prefill -= tokens
            if one.to_prefill:
                self._grow(one, tokens)
            else:
                self._advance(one, 1, tokens, deltas, finished)
        return StepResult(
            ok=True,
            work=work,
            step_id=step,
            participants=tuple([SequenceIdentity(one.seed.request_id, one.ref) for one in part]),
            execution=tuple(execution),
            deltas=tuple(deltas),
            finished=tuple(finished),
            preempted=preempted,
        )

    def _grow(self, one: ScriptedResident, tokens: int) -> None:
        one.computed += tokens
        size = self._script.page_size
        if one.computed > one.pages * size:
            missing = -(-one.computed // size) - one.pages
            if missing > self._runtime.free_pages:
                raise ExecutionError("the pool is dry: this step should not have been planned")
            self._runtime.free_pages -= missing
            one.pages += missing

    def _advance(
        self,
        one: ScriptedResident,
        most: int,
        prompt_tokens: int,
        deltas: list[tuple[ResidentRef, TokenDelta]],
        finished: list[tuple[ResidentRef, BatchResult]],
    ) -> None:
        """Append what the script says comes next: ``most`` tokens at the most."""
        script, request_id = self._script, one.seed.request_id
        new: list[int] = []
        reason: FinishReason | None = None
        if one.request.task == "embed":
            reason = FinishReason.STOP
        elif one.limit == 0:
            reason = FinishReason.LENGTH
        else:
            turns = self._runtime.turns
            turn = turns.get(request_id, 0)
            turns[request_id] = turn + 1
            for _ in range(min(most, script.burst(request_id, turn))):
                position = len(one.generated)
                if script.fail_requests.get(request_id) == position:
                    reason = FinishReason.ERROR
                    break
                token = script.tokens(request_id, position)
                new.append(token)
                one.generated.append(token)
                if position + 1 == script.length(request_id):
                    reason = FinishReason.STOP
                elif position + 1 >= one.limit:
                    reason = FinishReason.LENGTH
                if reason is not None:
                    break
        # A prefill computes its prompt; a decode, the token before and all but the last of its own.
        self._grow(one, prompt_tokens or len(new))
        if new:
            logprobs = None
            if one.seed.params.logprobs is not None:
                logprobs = tuple(TokenLogprob(token, -1.0) for token in new)
                one.logprobs.extend(logprobs)
            # In the seed's order the last tokens are in the snapshot alone.
            if reason is None or script.mixed:
                deltas.append((one.ref, TokenDelta(tuple(new), text_of(new), logprobs)))
        if reason is not None:
            finished.append((one.ref, self._result(one, reason)))
            self._free(one)

    def _result(self, one: ScriptedResident, reason: FinishReason) -> BatchResult:
        self._runtime.forget(one.seed.request_id)
        return BatchResult(
            request_id=one.seed.request_id,
            original_index=one.seed.original_index,
            token_ids=tuple(one.generated),
            text=text_of(one.generated),
            finish_reason=reason,
            logprobs=tuple(one.logprobs) if one.seed.params.logprobs is not None else None,
            prompt_tokens=len(one.seed.prompt_token_ids),
            error="scripted" if reason is FinishReason.ERROR else None,
        )

    def _cancelled_residents(self) -> list[tuple[ScriptedResident, FinishReason]]:
        return [
            (one, FinishReason.CANCELLED)
            for one in self._residents.values()
            if one.channel is not None and one.channel.cancelled
        ]

    def _at(self, ref: ResidentRef) -> ScriptedResident:
        one = self._residents.get(ref.slot)
        if one is None or (one.ref is not ref and one.ref != ref):
            raise ExecutionError(f"nobody is known as {ref}")
        return one

    def _free(self, one: ScriptedResident) -> None:
        del self._residents[one.ref.slot]
        self._slots.release(one.ref)
        self._runtime.free_pages += one.pages
        if self._owed == one.ref:
            self._owed = None
