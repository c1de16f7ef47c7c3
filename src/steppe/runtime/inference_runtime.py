"""The runtime's public face: ranks behind one object (seed 002, ``LLMInferenceRuntime``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.runtime.stepped.request import SteppedRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from steppe.request import LLMGenerationRequest, LLMGenerationResponse
    from steppe.runtime.boundary import GenerationBoundaryHook
    from steppe.runtime.metrics import (
        ContextCacheMetrics,
        LLMGenerationMetrics,
        LLMPrefillMetrics,
        MultimodalMetrics,
        SpecDecodeGenerationMetrics,
    )
    from steppe.runtime.rank_runtime import LLMRankRuntime
    from steppe.stepping.execution import SteppedExecution
    from steppe.stepping.types import RequestId
    from steppe.text.chat_template import ChatTemplate
    from steppe.text.tokenizer import Tokenizer

__all__ = ["LLMInferenceRuntime"]


class LLMInferenceRuntime:
    """Runs requests on its ranks; today one, inline on the caller's thread.

    ``validate`` and ``count_prompt_tokens`` are safe from any thread. All else is for the one
    thread that owns the runtime.
    """

    def __init__(self, rank: LLMRankRuntime) -> None:
        self._rank = rank

    # ---- requests ---------------------------------------------------------------------------

    def handle_request(
        self,
        request: LLMGenerationRequest,
        *,
        boundary_hook: GenerationBoundaryHook | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> LLMGenerationResponse | None:
        """See ``LLMRankRuntime.handle_request``."""
        return self._rank.handle_request(
            request, boundary_hook=boundary_hook, hidden_layers=hidden_layers
        )

    def begin_stepped(
        self, request: LLMGenerationRequest, request_id: RequestId
    ) -> SteppedExecution | None:
        """Open a stepped generation with ``request`` as its founder. None when one is open.

        Raises InvalidRequestError and its kin for bad input, ExecutionError without room.
        """
        return SteppedRequest.begin(self._rank, request, request_id)

    def validate(self, request: LLMGenerationRequest) -> LLMGenerationRequest:
        """Any thread: check a request and tokenize its prompt; the same request with token ids.

        Raises InvalidRequestError, ContextLengthError, ChatTemplateError.
        """
        return self._rank.preparation.validate(request)

    def count_prompt_tokens(self, request: LLMGenerationRequest) -> int:
        """Any thread: prompt tokens of a request, those of each prompt once."""
        return sum(
            len(self._rank.preparation.tokenize(one)) for one in request.requests or (request,)
        )

    def leaks(self) -> list[str]:
        """What an idle runtime should not still hold; empty when clean."""
        return self._rank.leaks()

    # ---- probes -----------------------------------------------------------------------------

    @property
    def supports_boundary_scheduling(self) -> bool:
        """Whether ``handle_request`` takes a boundary hook."""
        return self.world_size == 1

    @property
    def supports_stepped_execution(self) -> bool:
        """Whether ``begin_stepped`` works."""
        return self.world_size == 1

    @property
    def supports_seated_admission(self) -> bool:
        """Whether a running batch takes joiners."""
        return self._rank.supports_seated_admission

    @property
    def max_batch_size(self) -> int:
        """Seats."""
        return self._rank.max_batch_size

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self._rank.mapping.world_size

    @property
    def owns_global_rank(self) -> bool:
        """Whether this process holds rank 0."""
        return self._rank.mapping.rank == 0

    @property
    def context_length(self) -> int:
        """Most tokens of one sequence, prompt and answer."""
        return self._rank.preparation.context_length

    @property
    def overcommit(self) -> bool:
        """Whether admissions hold room for the prompt only (``EngineConfig.overcommit``)."""
        return self._rank.overcommit

    def set_overcommit(self, overcommit: bool) -> None:
        """Choose what admissions hold room for, before anything runs."""
        self._rank.overcommit = overcommit

    # ---- the model --------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """What the checkpoint calls itself."""
        return self._rank.artifacts.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Any thread."""
        return self._rank.artifacts.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, None for a base model."""
        return self._rank.artifacts.chat_template

    @property
    def generation_defaults(self) -> Mapping[str, int | float]:
        """Sampling fields that the model's generation_config sets."""
        return self._rank.artifacts.generation_defaults

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Token ids that end every answer of this model."""
        return self._rank.artifacts.stop_token_ids

    def capture_decoding_graph(self) -> bool:
        """See ``LLMRankRuntime.capture_decoding_graph``."""
        return self._rank.capture_decoding_graph()

    # ---- metrics ----------------------------------------------------------------------------

    @property
    def prefill_metrics(self) -> LLMPrefillMetrics:
        """Prompt token counters."""
        return self._rank.prefill_metrics

    @property
    def generation_metrics(self) -> LLMGenerationMetrics:
        """Generated token counters."""
        return self._rank.generation_metrics

    @property
    def spec_decode_generation_metrics(self) -> SpecDecodeGenerationMetrics:
        """Speculation counters."""
        return self._rank.spec_decode_generation_metrics

    @property
    def context_cache_metrics(self) -> ContextCacheMetrics | None:
        """Prefix reuse, None without a context cache."""
        return self._rank.context_cache_metrics

    def read_context_cache(self) -> ContextCacheMetrics | None:
        """Any thread: ``context_cache_metrics``."""
        return self._rank.context_cache_metrics

    @property
    def multimodal_metrics(self) -> MultimodalMetrics:
        """Media counters."""
        return self._rank.multimodal_metrics
