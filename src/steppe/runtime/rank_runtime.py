"""One rank's runtime (seed 002, ``LLMRankRuntime``): a model, a backend, a page pool, one
generation at a time.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import accumulate
from typing import TYPE_CHECKING

from steppe.errors import (
    BackendError,
    ExecutionError,
    InvalidRequestError,
    UnsupportedRequestError,
)
from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.runtime.artifacts import ModelArtifacts, load_artifacts
from steppe.runtime.config import RuntimeConfig, pool_pages
from steppe.runtime.context import DecodingInferenceContext
from steppe.runtime.decoding.vanilla import VanillaDecoding
from steppe.runtime.delivery import BlockingDelivery
from steppe.runtime.executor import StepExecutor
from steppe.runtime.generation import (
    ActiveLatch,
    InProgressGuard,
    SteppedGeneration,
    StreamChannelFinalizer,
)
from steppe.runtime.hidden_states import HiddenStates
from steppe.runtime.kv.managed import ManagedKVCacheRequest
from steppe.runtime.kv.memory import KvMemory
from steppe.runtime.metrics import (
    ContextCacheMetrics,
    LLMGenerationMetrics,
    LLMPrefillMetrics,
    MultimodalMetrics,
    SpecDecodeGenerationMetrics,
)
from steppe.runtime.parallel.mapping import ParallelMapping
from steppe.runtime.preparation import RequestPreparation
from steppe.runtime.responses import to_response
from steppe.runtime.session import GenerationSession
from steppe.stepping.resident_slots import ResidentSlots
from steppe.text.pipeline import TextPipeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from steppe.backends.base import Backend
    from steppe.request import LLMGenerationResponse
    from steppe.runtime.artifacts import LoadProgress
    from steppe.runtime.boundary import GenerationBoundaryHook
    from steppe.runtime.decoding.strategy import DecodingStrategy
    from steppe.stepping.types import SlotSeed
    from steppe.streaming import StreamChannel

__all__ = ["LLMRankRuntime"]


class LLMRankRuntime:
    """Owns a traced model, its cache pages and the one generation that may be open.

    Calls are externally serialised: one thread. An accidental overlap is rejected before anything
    changes; that is not a general thread-safety guarantee. ``engine_dir`` is a model reference, or
    give ``artifacts`` that are loaded already. ``backend`` is fresh: this runtime traces it.

    Raises ModelError for a model that cannot be used, BackendError for a backend that cannot run
    it.
    """

    def __init__(
        self,
        engine_dir: str | Path | None = None,
        *,
        backend: Backend,
        artifacts: ModelArtifacts | None = None,
        multimodal_engine_dir: str | Path | None = None,
        lora_weights_map: Mapping[str, str] | None = None,
        mapping: ParallelMapping | None = None,
        config: RuntimeConfig | None = None,
        on_progress: LoadProgress | None = None,
    ) -> None:
        if (engine_dir is None) == (artifacts is None):
            raise InvalidRequestError("engine_dir", "give exactly one of engine_dir and artifacts")
        if multimodal_engine_dir is not None:
            raise UnsupportedRequestError("multimodal_engine_dir", "no multimodal runner exists")
        if lora_weights_map:
            raise UnsupportedRequestError("lora_weights_map", "adapters are not supported")
        self.mapping = mapping or ParallelMapping()
        if self.mapping.parallel:
            raise BackendError(f"a world of {self.mapping.world_size} ranks is not supported")
        self.config = config or RuntimeConfig()
        if artifacts is None:
            assert engine_dir is not None
            artifacts = load_artifacts(
                engine_dir, max_model_len=self.config.max_model_len, on_progress=on_progress
            )
        self.artifacts = artifacts
        self._backend = backend
        if on_progress is not None:
            on_progress("weights")
        backend.trace(artifacts.program, kv_dtype=self.config.kv_dtype)
        context_length = artifacts.program.max_positions
        if self.config.max_model_len is not None:
            context_length = min(context_length, self.config.max_model_len)
        pages = pool_pages(self.config, backend, context_length)
        backend.allocate_cache([pages] * len(backend.groups))
        self.page_bytes = sum(map(backend.page_bytes, range(len(backend.groups))))
        self.preparation = RequestPreparation(
            artifacts,
            min(context_length, pages * backend.page_size),
            backend.page_size,
            pages,
        )
        self._memory = KvMemory(
            backend,
            artifacts.program,
            pages,
            self.preparation.page_keys,
            self.config.context_cache,
            self.preparation.set_aside,
        )
        self.pool = self._memory.pool
        self.context_cache = self._memory.cache
        self.system_prompts = self._memory.system_prompts
        self.executor = StepExecutor(backend)
        self.overcommit = False
        self._strategy: DecodingStrategy = VanillaDecoding()
        self._slots = ResidentSlots(self.config.max_batch_size)
        self._latch = ActiveLatch()
        self._hidden = HiddenStates()
        self._prefill_metrics = LLMPrefillMetrics()
        self._generation_metrics = LLMGenerationMetrics()
        self._spec_metrics = SpecDecodeGenerationMetrics()

    # ---- the blocking call ------------------------------------------------------------------

    def handle_request(
        self,
        request: LLMGenerationRequest,
        *,
        boundary_hook: GenerationBoundaryHook | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> LLMGenerationResponse | None:
        """Generate for one request, of one or several sequences, and block until all have ended.

        ``boundary_hook`` is called between steps and once at the end; whom it admits then is still
        served. ``hidden_layers`` asks for ``base_model_hidden_states`` of this request's prompts.
        Returns None, and nothing changed, when a generation is open already.

        Raises InvalidRequestError and its kin for bad input, ExecutionError when a step fails;
        every stream has ended then.
        """
        generation = self.begin_generation(
            request, hidden_layers=hidden_layers, boundary_scheduling=boundary_hook is not None
        )
        if generation is None:
            return None
        delivery = BlockingDelivery(request.sequences())
        with generation:
            session = generation.session
            session.prime_from_prefill()
            delivery.step(session.last_step)
            while True:
                if boundary_hook is not None:
                    boundary_hook(session)
                if session.finished:
                    break
                session.advance()
                delivery.step(session.last_step)
            return self.finish_generation(generation)

    def begin_generation(
        self,
        request: LLMGenerationRequest,
        *,
        founder_request_id: int = 0,
        hidden_layers: Sequence[int] = (),
        boundary_scheduling: bool = False,
        prefill: bool = True,
    ) -> SteppedGeneration | None:
        """All that comes before the loop: validation, seats, leases, and the founding prefill.

        Without ``prefill`` the founders are seated and nothing has run: the stepped plane does that
        as steps. Returns None, and nothing changed, when a generation is open already. Raises as
        ``handle_request`` does; nothing stays open then.
        """
        sequences = request.sequences()
        if len(sequences) > self.config.max_batch_size:
            raise UnsupportedRequestError(
                "requests", f"{len(sequences)} sequences, at most {self.config.max_batch_size} fit"
            )
        outputs = self._hidden.check(hidden_layers, len(self.artifacts.program.layers))
        if outputs and any(one.task == "embed" for one in sequences):
            raise UnsupportedRequestError(
                "hidden_layers", "an embedding takes the final one itself"
            )
        seeds = [
            self.preparation.seed(one, index, founder_request_id)
            for index, one in enumerate(sequences)
        ]
        if not self._latch.take():
            return None
        with ExitStack() as undo:
            undo.callback(self._latch.release)
            channels = _channels(request)
            if prefill:
                # The stepped plane's engine has claimed its channels itself.
                _claim(channels)
            self._hidden.clear()
            undo.pop_all()
        # Hidden states are wanted of every token.
        managed = ManagedKVCacheRequest(self.pool, self.context_cache, bypass=bool(outputs))
        context = DecodingInferenceContext(self._slots, managed, self._text_pipeline)
        headroom = self._strategy.required_kv_headroom()
        finalizer = StreamChannelFinalizer(channels) if prefill else None
        session = GenerationSession(
            self,
            context,
            self._strategy,
            managed,
            request,
            headroom,
            boundary_scheduling_active=boundary_scheduling,
            stream_finalizer=finalizer,
        )
        generation = SteppedGeneration(
            guard=InProgressGuard(self._latch),
            request=request,
            context=context,
            strategy=self._strategy,
            managed_request=managed,
            kv_headroom=headroom,
            session=session,
            stream_finalizer=finalizer,
            founder_request_id=founder_request_id,
        )
        with ExitStack() as undo:
            undo.enter_context(generation)
            session.found(seeds)
            if outputs and session.resident_count < len(seeds):
                raise UnsupportedRequestError(
                    "hidden_layers", "the page pool does not hold all sequences at once"
                )
            if prefill:
                outcomes = session.prefill_founders(tuple(outputs.values()))
                self._hidden.capture(outputs, outcomes, [seed.prompt_token_ids for seed in seeds])
            undo.pop_all()
        return generation

    def finish_generation(self, generation: SteppedGeneration) -> LLMGenerationResponse | None:
        """All that comes after the loop: the response, from what the steps left behind.

        None when a founder left before it finished (preempted, resumed elsewhere). Raises
        ExecutionError while a sequence is still seated.
        """
        session = generation.session
        if not session.finished:
            raise ExecutionError("sequences are still running")
        request = generation.request
        counts = [len(one.sequences()) for one in request.requests or (request,)]
        done = session.take_completed_at_or_above(0)
        generation.close()
        if any(index not in done for index in range(sum(counts))):
            return None
        results = [done[index] for index in range(sum(counts))]
        # Sequences of one request share its prompt: it counts once.
        prompts = sum(results[end - 1].prompt_tokens for end in accumulate(counts))
        return to_response(results, prompts)

    # ---- what a session asks ----------------------------------------------------------------

    @property
    def max_step_tokens(self) -> int:
        """Tokens a step of the blocking loop may take."""
        return self.config.max_step_tokens

    def reservation(self, seed: SlotSeed) -> int:
        """Tokens to hold room for when ``seed`` is seated."""
        return self.preparation.reservation(seed, overcommit=self.overcommit)

    def _text_pipeline(self, seed: SlotSeed) -> TextPipeline:
        params = seed.params
        return TextPipeline(
            self.artifacts.tokenizer,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop,
            prompt_ids_tail=seed.prompt_token_ids[-8:],
        )

    # ---- probes and settings ----------------------------------------------------------------

    def capture_decoding_graph(self) -> bool:
        """Prepare the fastest form of a decode step. False when that failed; inference goes on."""
        return self._backend.capture()

    def gen_and_save_system_prompt_kv_cache(
        self, prompt: str | Sequence[int], lora_weights_name: str = ""
    ) -> bool:
        """Compute a prompt, text or token ids, and keep its full pages for good: requests that
        begin with the same tokens reuse them. ``system_prompts`` has what is kept, and saves it.

        Returns False, and keeps nothing, for a prompt shorter than a page or while a generation is
        open; True for an empty one. Raises UnsupportedRequestError without a context cache, for an
        adapter, and for a prompt that would take too much of the pool.
        """
        if not self.context_cache.enabled:
            raise UnsupportedRequestError("prompt", "this runtime has no context cache")
        if lora_weights_name:
            raise UnsupportedRequestError("lora_weights_name", "adapters are not supported")
        if not len(prompt):
            return True
        ids = self.preparation.tokenize(LLMGenerationRequest(prompt))
        count = len(ids) // self.pool.page_size
        if not count:
            return False
        if self.system_prompts.known(ids):
            return True
        self.system_prompts.check_room(count)
        # One token more than its pages, as for any other request.
        params = SamplingParams(temperature=0.0, max_tokens=1)
        whole = LLMGenerationRequest(ids[: count * self.pool.page_size], params=params)
        return self.handle_request(whole) is not None and self.system_prompts.pin(ids)

    def set_action_noise_seed(self, seed: int) -> None:
        """Seed an action runner's noise. Without one, as here, it has no effect (seed 002)."""

    def set_visual_pruner_config(self, config: object) -> None:
        """Raises UnsupportedRequestError: there is no vision runner to prune the tokens of."""
        raise UnsupportedRequestError("config", "this runtime has no vision runner")

    def base_model_hidden_states(self, layer_idx: int) -> npt.NDArray[np.float32] | None:
        """Hidden states of the last ``handle_request``'s prompts, float32 [batch, prefill_length,
        width], zero past a prompt's end; None for a layer it did not ask for.

        Layer 0 is the input embeddings, layer i the input of layer i, -1 the final norm's output.
        Valid until the next request begins.
        """
        return self._hidden.layer(layer_idx)

    @property
    def base_model_prefill_length(self) -> int:
        """Longest prompt of the last request that asked for hidden states, else 0."""
        return self._hidden.prefill_length

    @property
    def base_model_input_token_ids(self) -> list[list[int]]:
        """Prompt token ids of the last request, per sequence."""
        return self._hidden.input_token_ids

    @property
    def embedding_table(self) -> npt.NDArray[np.float32]:
        """The token embeddings, float32 [vocab, width]."""
        return self._backend.embedding_table()

    @property
    def prefill_metrics(self) -> LLMPrefillMetrics:
        """Prompt token counters."""
        return self._prefill_metrics

    @property
    def generation_metrics(self) -> LLMGenerationMetrics:
        """Generated token counters."""
        return self._generation_metrics

    @property
    def spec_decode_generation_metrics(self) -> SpecDecodeGenerationMetrics:
        """Speculation counters, only meaningful with a draft."""
        return self._spec_metrics

    @property
    def context_cache_metrics(self) -> ContextCacheMetrics | None:
        """Prefix reuse, None when the cache is disabled. Any thread."""
        return self._memory.metrics()

    @property
    def multimodal_metrics(self) -> MultimodalMetrics:
        """Empty without a multimodal runner."""
        return MultimodalMetrics()

    @property
    def speculative_decoding_strategy_name(self) -> str:
        """The speculative strategy's name, "" when there is none."""
        return self._strategy.name if self._strategy.is_speculative else ""

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft is loaded and speculation is available."""
        return self._strategy.is_speculative

    @property
    def supports_seated_admission(self) -> bool:
        """Whether running batches take joiners. Always, here: also for sliding-window models."""
        return True

    @property
    def max_batch_size(self) -> int:
        """Seats."""
        return self.config.max_batch_size

    @property
    def generating(self) -> bool:
        """Whether a generation is open."""
        return self._latch.taken

    def leaks(self) -> list[str]:
        """What an idle runtime should not still hold, in words; empty when clean. For tests: while
        a generation is open it has something to say.
        """
        found = []
        if self.generating:
            found.append("a generation is open")
        if taken := self.max_batch_size - self._slots.free:
            found.append(f"{taken} seats of the runtime are taken")
        return found + self._memory.leaks()


def _channels(request: LLMGenerationRequest) -> list[StreamChannel]:
    if request.requests and request.stream_channel is not None:
        raise InvalidRequestError("stream_channel", "a batch has no channel, its requests have")
    channels = [
        one.stream_channel
        for one in request.requests or (request,)
        if one.stream_channel is not None
    ]
    if len(set(channels)) < len(channels):
        raise InvalidRequestError("stream_channel", "a channel serves one request")
    return channels


def _claim(channels: Sequence[StreamChannel]) -> None:
    for channel in channels:
        if channel.attached or channel.finished:
            raise InvalidRequestError("stream_channel", "a channel serves one request")
    for channel in channels:
        channel.attach()
