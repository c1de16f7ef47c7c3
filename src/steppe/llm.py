"""``LLM``: a model and its engine in one object, for programs that just want answers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, cast, overload

from steppe.backends.select import create_backend
from steppe.engine.config import EngineConfig, ShutdownMode
from steppe.engine.request_engine import RequestEngine
from steppe.errors import InvalidRequestError, SubmitError
from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.runtime.artifacts import load_artifacts
from steppe.runtime.config import RuntimeConfig
from steppe.runtime.inference_runtime import LLMInferenceRuntime
from steppe.runtime.kv.context_cache import ContextCacheConfig
from steppe.runtime.rank_runtime import LLMRankRuntime
from steppe.text.chat_template import encode_chat

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable
    from pathlib import Path
    from types import TracebackType

    from steppe.engine.handle import RequestHandle
    from steppe.engine.recording import Recorder
    from steppe.request import LLMGenerationResponse, Message
    from steppe.runtime.artifacts import LoadProgress, ModelArtifacts
    from steppe.streaming import StreamChunk
    from steppe.text.tokenizer import Tokenizer

__all__ = ["LLM", "default_pending_tokens"]

Prompt = str | Sequence[int]
Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]]
Conversation = Sequence[Mapping[str, Any]]


def default_pending_tokens(context_length: int, max_batch_size: int) -> int:
    """Prompt tokens that may be pending where nobody says how many: one full context for each
    seat, and sixteen at least.
    """
    return max(max_batch_size, 16) * context_length


class LLM:
    """A loaded model behind a running engine. Any thread may call any method.

    ``model`` is a path (a ``.gguf`` file, a Hugging Face or an engine directory), a hub id
    (``org/repo``, ``org/repo:Q4_K_M``) or a packaged name (``smollm2-135m``). ``quantize`` "q8" or
    "q4" loads a float checkpoint's matrices in groups of 32. ``kv_memory`` in bytes; ``kv_dtype``
    is what keys and values are kept as: auto (bfloat16 on native), float16, int8, or what else the
    backend keeps. ``context_cache`` keeps computed prefixes for later requests, in memory that
    nobody needs at the time; those of conversations that begin with ``system_prompt`` are computed
    at once and kept for good. ``spill_memory`` more bytes, in ``spill_folder`` if that is given,
    keep what is evicted there. ``max_pending`` bounds the sequences that wait or run, and
    ``max_pending_tokens`` the prompt tokens of those that have no token yet (None:
    ``default_pending_tokens``); ``scheduling`` is that of ``EngineConfig``; a step of more than
    ``hang_limit`` seconds fails the engine. ``params`` of None anywhere means the model's own
    generation_config over the defaults of ``SamplingParams``; given ones are taken as they are. One
    prompt or conversation gives one response, a list of them a list, in the same order.

    A context manager: leaving it finishes what runs, or cancels it after an exception.

    Raises ModelError for a model that cannot be used, BackendError for a backend that cannot run
    it. Every generating call raises InvalidRequestError and its kin for bad input, SubmitError when
    the engine refuses, RequestFailedError when the request dies.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: str = "auto",
        dtype: str = "auto",
        quantize: str | None = None,
        threads: int | None = None,
        max_batch_size: int = 32,
        max_model_len: int | None = None,
        kv_memory: int | None = None,
        kv_dtype: str = "auto",
        context_cache: bool = True,
        spill_memory: int = 0,
        spill_folder: Path | None = None,
        system_prompt: str | None = None,
        max_step_tokens: int | None = None,
        max_pending: int = 256,
        max_pending_tokens: int | None = None,
        scheduling: Literal["fcfs", "fair"] = "fcfs",
        hang_limit: float | None = None,
        cache_dir: Path | None = None,
        on_progress: LoadProgress | None = None,
    ) -> None:
        config = RuntimeConfig(
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            kv_memory=kv_memory,
            kv_dtype=kv_dtype,
            context_cache=ContextCacheConfig(context_cache, spill_memory, spill_folder),
        )
        artifacts = load_artifacts(
            model,
            max_model_len=max_model_len,
            quantize=quantize,
            cache_dir=cache_dir,
            on_progress=on_progress,
        )
        rank = LLMRankRuntime(
            artifacts=artifacts,
            backend=create_backend(backend, dtype=dtype, threads=threads),
            config=config,
            on_progress=on_progress,
        )
        self.pinned_tokens = 0
        """Tokens of the system prompt that are kept computed."""
        if system_prompt is not None:
            prefix = _system_prefix(artifacts, system_prompt)
            if rank.gen_and_save_system_prompt_kv_cache(prefix):
                page = rank.pool.page_size
                self.pinned_tokens = len(prefix) // page * page
        self.name = artifacts.name
        self.max_batch_size = max_batch_size
        self.scheduling: Literal["fcfs", "fair"] = scheduling
        self.tokenizer: Tokenizer = artifacts.tokenizer
        self.chat_template = artifacts.chat_template
        self.generation_defaults: Mapping[str, int | float] = artifacts.generation_defaults
        runtime = LLMInferenceRuntime(rank)
        self.context_length = runtime.context_length
        self.cache_tokens = rank.pool.capacity * rank.pool.page_size
        self._sizes = {
            "model": artifacts.name,
            "context_length": runtime.context_length,
            "page_size": rank.pool.page_size,
            "pages": rank.pool.capacity,
            "page_bytes": rank.page_bytes,
        }
        self.engine = RequestEngine(
            runtime,
            EngineConfig(
                command_queue_capacity=max(64, max_pending),
                max_pending_requests=max_pending,
                max_pending_tokens=default_pending_tokens(runtime.context_length, max_batch_size)
                if max_pending_tokens is None
                else max_pending_tokens,
                max_batch_size=max_batch_size,
                max_step_tokens=max_step_tokens,
                scheduling=scheduling,
                hang_limit=hang_limit,
            ),
        )

    # ---- parameters -------------------------------------------------------------------------

    def sampling_params(self, **given: Any) -> SamplingParams:
        """``SamplingParams`` with the model's own defaults for what is absent or None."""
        named = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**self.generation_defaults, **named})

    # ---- whole answers ----------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> LLMGenerationResponse: ...
    @overload
    def generate(
        self, prompt: Prompts, params: SamplingParams | None = None
    ) -> list[LLMGenerationResponse]: ...
    def generate(
        self, prompt: Prompt | Prompts, params: SamplingParams | None = None
    ) -> LLMGenerationResponse | list[LLMGenerationResponse]:
        """Continue a prompt, text or token ids: one response, or a list for a list of prompts."""
        one, prompts = _prompts(prompt)
        answers = self._answer(self._request(each, params) for each in prompts)
        return answers[0] if one else answers

    @overload
    def chat(
        self, messages: Conversation, params: SamplingParams | None = None
    ) -> LLMGenerationResponse: ...
    @overload
    def chat(
        self, messages: Sequence[Conversation], params: SamplingParams | None = None
    ) -> list[LLMGenerationResponse]: ...
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | None = None,
    ) -> LLMGenerationResponse | list[LLMGenerationResponse]:
        """Answer a conversation through the chat template: one response, or a list for several."""
        one, conversations = _conversations(messages)
        answers = self._answer(self._chat_request(each, params) for each in conversations)
        return answers[0] if one else answers

    @overload
    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> LLMGenerationResponse: ...
    @overload
    async def agenerate(
        self, prompt: Prompts, params: SamplingParams | None = None
    ) -> list[LLMGenerationResponse]: ...
    async def agenerate(
        self, prompt: Prompt | Prompts, params: SamplingParams | None = None
    ) -> LLMGenerationResponse | list[LLMGenerationResponse]:
        """``generate`` for an event loop. Cancelling the task cancels the requests."""
        one, prompts = _prompts(prompt)
        answers = await self._answer_async(self._request(each, params) for each in prompts)
        return answers[0] if one else answers

    @overload
    async def achat(
        self, messages: Conversation, params: SamplingParams | None = None
    ) -> LLMGenerationResponse: ...
    @overload
    async def achat(
        self, messages: Sequence[Conversation], params: SamplingParams | None = None
    ) -> list[LLMGenerationResponse]: ...
    async def achat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | None = None,
    ) -> LLMGenerationResponse | list[LLMGenerationResponse]:
        """``chat`` for an event loop. Cancelling the task cancels the requests."""
        one, conversations = _conversations(messages)
        answers = await self._answer_async(
            self._chat_request(each, params) for each in conversations
        )
        return answers[0] if one else answers

    @overload
    def embed(self, text: Prompt) -> tuple[float, ...]: ...
    @overload
    def embed(self, text: Prompts) -> list[tuple[float, ...]]: ...
    def embed(self, text: Prompt | Prompts) -> tuple[float, ...] | list[tuple[float, ...]]:
        """The embedding of a text, of unit length; a list of them for a list of texts."""
        one, texts = _prompts(text)
        answers = self._answer(LLMGenerationRequest(each, task="embed") for each in texts)
        vectors = [answer.outputs[0].embedding or () for answer in answers]
        return vectors[0] if one else vectors

    # ---- streams ----------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[StreamChunk, None, None]:
        """Continue one prompt chunk by chunk. Closing the iterator early cancels the request."""
        return self._chunks(self.engine.submit(self._request(prompt, params)))

    def stream_chat(
        self, messages: Conversation, params: SamplingParams | None = None
    ) -> Generator[StreamChunk, None, None]:
        """Answer one conversation chunk by chunk. Closing it early cancels the request."""
        return self._chunks(self.engine.submit(self._chat_request(messages, params)))

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[StreamChunk, None]:
        """``stream`` for an event loop."""
        return self._chunks_async(self.engine.submit(self._request(prompt, params)))

    def astream_chat(
        self, messages: Conversation, params: SamplingParams | None = None
    ) -> AsyncGenerator[StreamChunk, None]:
        """``stream_chat`` for an event loop."""
        return self._chunks_async(self.engine.submit(self._chat_request(messages, params)))

    # ---- recordings -------------------------------------------------------------------------

    def record(self, path: Path, *, prompts: bool = False) -> Recorder:
        """Write every step from now on to ``path``, until the recorder is closed or this ends: for
        ``steppe plan``, ``replay`` and ``trace``. Prompts are left out unless asked for.
        """
        return self.engine.record(path, prompts=prompts, **self._sizes)

    # ---- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what runs and stop the engine. Idempotent."""
        self.engine.shutdown(ShutdownMode.DRAIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.engine.shutdown(ShutdownMode.DRAIN if kind is None else ShutdownMode.CANCEL)

    # ---- inside -----------------------------------------------------------------------------

    def _request(self, prompt: Prompt, params: SamplingParams | None) -> LLMGenerationRequest:
        return LLMGenerationRequest(prompt, params=params or self.sampling_params())

    def _chat_request(
        self, messages: Conversation, params: SamplingParams | None
    ) -> LLMGenerationRequest:
        return LLMGenerationRequest(messages=messages, params=params or self.sampling_params())

    def _answer(self, requests: Iterable[LLMGenerationRequest]) -> list[LLMGenerationResponse]:
        handles: list[RequestHandle] = []
        waiting: deque[RequestHandle] = deque()
        try:
            for request in requests:
                handle = self._submit(request, waiting)
                while handle is None:
                    # The engine is full of our own requests: one must end before the next begins.
                    waiting.popleft().get()
                    handle = self._submit(request, waiting)
                handles.append(handle)
                waiting.append(handle)
            return [handle.get() for handle in handles]
        finally:
            _cancel_unfinished(handles)

    async def _answer_async(
        self, requests: Iterable[LLMGenerationRequest]
    ) -> list[LLMGenerationResponse]:
        handles: list[RequestHandle] = []
        waiting: deque[RequestHandle] = deque()
        try:
            for request in requests:
                handle = self._submit(request, waiting)
                while handle is None:
                    await waiting.popleft()
                    handle = self._submit(request, waiting)
                handles.append(handle)
                waiting.append(handle)
            return [await handle for handle in handles]
        finally:
            _cancel_unfinished(handles)

    def _submit(
        self, request: LLMGenerationRequest, waiting: Sequence[RequestHandle]
    ) -> RequestHandle | None:
        """None when the engine is full and some of our own requests are still to end."""
        try:
            return self.engine.submit(request)
        except SubmitError as refusal:
            if refusal.reason not in ("queue_full", "backlog_full") or not waiting:
                raise
            return None

    @staticmethod
    def _chunks(handle: RequestHandle) -> Generator[StreamChunk, None, None]:
        try:
            while (chunk := handle.stream.wait_pop()) is not None:
                yield chunk
            handle.get()
        finally:
            handle.cancel()

    @staticmethod
    async def _chunks_async(handle: RequestHandle) -> AsyncGenerator[StreamChunk, None]:
        try:
            async for chunk in handle.stream:
                yield chunk
            await handle
        finally:
            handle.cancel()


def _system_prefix(artifacts: ModelArtifacts, system_prompt: str) -> list[int]:
    """The tokens that every conversation under a system prompt begins with."""
    template = artifacts.chat_template
    if template is None:
        return artifacts.tokenizer.encode(system_prompt)
    conversations = [
        encode_chat(
            artifacts.tokenizer,
            template,
            [{"role": "system", "content": system_prompt}, {"role": "user", "content": content}],
        )
        for content in ("one", "Two", "3")
    ]
    shared = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*conversations, strict=False))
    return [ids[0] for ids in shared]


def _cancel_unfinished(handles: Sequence[RequestHandle]) -> None:
    for handle in handles:
        if not handle.ready:
            handle.cancel()


def _prompts(prompt: Prompt | Prompts) -> tuple[bool, Sequence[Prompt]]:
    """Whether ``prompt`` is a single one, and the prompts it stands for."""
    if isinstance(prompt, str):
        return True, (prompt,)
    if not len(prompt):
        raise InvalidRequestError("prompt", "is empty")
    # Strings and id lists have a length, single token ids have none.
    whole = [hasattr(one, "__len__") for one in prompt]
    if not any(whole):
        return True, (cast("Sequence[int]", prompt),)
    if not all(whole):
        raise InvalidRequestError("prompt", "mixes prompts with single token ids")
    return False, cast("Sequence[Prompt]", prompt)


def _conversations(
    messages: Conversation | Sequence[Conversation],
) -> tuple[bool, Sequence[Conversation]]:
    """Whether ``messages`` is a single conversation, and the conversations it stands for."""
    if not len(messages):
        raise InvalidRequestError("messages", "is empty")
    if isinstance(messages[0], Mapping):
        return True, (cast("Sequence[Message]", messages),)
    return False, cast("Sequence[Conversation]", messages)
