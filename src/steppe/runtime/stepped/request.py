"""One request held open under the stepped plane: the single-rank execution (seed 001)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from steppe.errors import ExecutionError, InvalidRequestError, UnsupportedRequestError
from steppe.runtime.stepped.stepper import RuntimeStepper
from steppe.stepping.execution import SteppedExecution
from steppe.stepping.types import AdmissionIntent, AdmissionStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.request import LLMGenerationRequest, LLMGenerationResponse
    from steppe.runtime.generation import SteppedGeneration
    from steppe.runtime.rank_runtime import LLMRankRuntime
    from steppe.stepping.types import (
        AdmissionResult,
        BatchResult,
        ExecutionSnapshot,
        ImmutableDecodeBatch,
        ImmutablePrefillBatch,
        ImmutableStepBatch,
        RequestId,
        ResidentRef,
        SlotSeed,
        StepResult,
    )
    from steppe.streaming import StreamChannel

__all__ = ["SteppedRequest"]

WAITING_INTENTS = 16
"""Intents kept for requests that found no room; a refused head is not tokenized again."""


class SteppedRequest(SteppedExecution):
    """A generation, its session and the stepper over it, owned across ticks. Actor thread only."""

    mixed_steps = True

    def __init__(self, runtime: LLMRankRuntime, generation: SteppedGeneration) -> None:
        self._runtime = runtime
        self._generation: SteppedGeneration | None = generation
        self._stepper = RuntimeStepper(runtime, generation.session)
        self._intents: OrderedDict[RequestId, AdmissionIntent] = OrderedDict()

    @classmethod
    def begin(
        cls, runtime: LLMRankRuntime, request: LLMGenerationRequest, request_id: RequestId
    ) -> SteppedRequest | None:
        """Open a generation with ``request`` seated as its founder; nothing has run yet.

        None when another generation is open. Raises InvalidRequestError and its kin for bad input,
        ExecutionError when the founder finds no room in an empty pool.
        """
        if request_id == 0:
            raise InvalidRequestError("request_id", "0 is nobody's id")
        generation = runtime.begin_generation(request, founder_request_id=request_id, prefill=False)
        if generation is None:
            return None
        if generation.session.resident_count != len(request.sequences()):
            generation.close()
            raise ExecutionError("the founder does not fit the page pool")
        return cls(runtime, generation)

    @property
    def stepper(self) -> RuntimeStepper:
        """The typed operations."""
        return self._stepper

    def residents(self) -> Sequence[ResidentRef]:
        return self._stepper.residents()

    def build_intent(
        self, request: LLMGenerationRequest, original_index: int, request_id: RequestId
    ) -> AdmissionIntent:
        """Validate, template and tokenize a joiner. Touches no resident. Raises for bad input."""
        if request.requests or request.params.n != 1:
            raise UnsupportedRequestError("requests", "only a single sequence can join a batch")
        seed = self._runtime.preparation.seed(request, original_index, request_id)
        return AdmissionIntent(request_id, seed)

    def admit(
        self,
        request: LLMGenerationRequest,
        original_index: int,
        request_id: RequestId,
        *,
        resume: SlotSeed | None = None,
    ) -> AdmissionResult:
        self._session_open()
        if resume is not None:
            seed = replace(resume, original_index=original_index, request_id=request_id)
            return self._stepper.admit(AdmissionIntent(request_id, seed))
        intent = self._intents.get(request_id)
        if intent is None or intent.seed.original_index != original_index:
            intent = self.build_intent(request, original_index, request_id)
        result = self._stepper.admit(intent)
        if result.status is AdmissionStatus.NO_CAPACITY:
            self._intents[request_id] = intent
            while len(self._intents) > WAITING_INTENTS:
                self._intents.popitem(last=False)
        else:
            self._intents.pop(request_id, None)
        return result

    def prefill(self, batch: ImmutablePrefillBatch) -> StepResult:
        return self._stepper.prefill(batch)

    def decode(self, batch: ImmutableDecodeBatch) -> StepResult:
        return self._stepper.decode(batch)

    def step(self, batch: ImmutableStepBatch) -> StepResult:
        return self._stepper.step(batch)

    def snapshot(self) -> ExecutionSnapshot:
        return self._stepper.snapshot()

    def channel(self, ref: ResidentRef) -> StreamChannel | None:
        return self._session_open().session.find(ref).seed.stream_channel

    def materialize(
        self, result: BatchResult, stop_strings: Sequence[str]
    ) -> LLMGenerationResponse:
        return self._session_open().session.materialize_result(result, stop_strings)

    def finish(self) -> LLMGenerationResponse | None:
        generation = self._session_open()
        if generation.session.resident_count:
            raise ExecutionError("an execution finishes when nobody is seated")
        self._generation = None
        return self._runtime.finish_generation(generation)

    def abort(self) -> None:
        generation, self._generation = self._generation, None
        if generation is not None:
            generation.close()

    def _session_open(self) -> SteppedGeneration:
        if self._generation is None:
            raise ExecutionError("this execution is over")
        return self._generation
