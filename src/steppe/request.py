"""What a caller says and what a caller gets back.

Seed 002 (``LLMGenerationRequest``, ``LLMGenerationResponse``) and DESIGN section 3.2. Everything
here is a value: built and checked on the caller's thread, never changed afterwards. Checks that
need a model (ids inside the vocabulary, prompt inside the context) are made by whoever owns one,
with the same exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, get_args

from steppe.errors import InvalidRequestError, UnsupportedRequestError
from steppe.params import (
    MAX_SEQUENCES,
    Guided,
    SamplingParams,
    checked_integer,
    checked_number,
)

if TYPE_CHECKING:
    from steppe.streaming import StreamChannel

__all__ = [
    "CacheCommit",
    "CacheLookup",
    "FinishReason",
    "Guided",
    "LLMGenerationRequest",
    "LLMGenerationResponse",
    "SamplingParams",
    "SequenceOutput",
    "TokenLogprob",
    "Usage",
]


class FinishReason(StrEnum):
    """Why a sequence ended. STOP covers EOS and stop rules; ``stop_reason`` says which one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


CacheLookup = Literal["use", "bypass"]
"""Whether a request may begin with pages that others have computed."""
CacheCommit = Literal["all", "prompt", "none"]
"""Which of a request's full pages others may find later."""

MAX_SALT = 256
"""Characters of a cache salt."""

Message = Mapping[str, Any]
"""One chat turn: ``role``, ``content`` and whatever else the template reads."""


@dataclass(frozen=True, slots=True)
class LLMGenerationRequest:
    """One thing to generate (seed 002). Exactly one of ``prompt`` and ``messages`` is given.

    ``prompt`` is text or token ids; ``messages`` is one conversation, rendered by the model's chat
    template. ``params.n`` > 1 asks for that many sequences; ``sequence_index`` is which of them
    this request is, once it has been split, and keys its random draws. ``stream_channel`` receives
    the chunks and is used once. ``task`` "embed" runs the prompt and generates nothing. ``caller``
    and ``priority`` (higher is sooner) serve fair scheduling; the three timeouts are seconds from
    submission. ``cache_lookup`` "bypass" computes every token anew, ``cache_commit`` limits what
    the context cache keeps of this request, and requests with different ``cache_salt`` share
    nothing there, nor can they tell by the time it takes what others have asked.

    Raises InvalidRequestError naming the field.
    """

    prompt: str | Sequence[int] | None = None
    messages: Sequence[Message] | None = field(default=None, kw_only=True)
    params: SamplingParams = field(default_factory=SamplingParams, kw_only=True)
    stream_channel: StreamChannel | None = field(default=None, kw_only=True, compare=False)
    task: Literal["generate", "embed"] = field(default="generate", kw_only=True)
    caller: str = field(default="", kw_only=True)
    priority: int = field(default=0, kw_only=True)
    queue_timeout: float | None = field(default=None, kw_only=True)
    first_token_timeout: float | None = field(default=None, kw_only=True)
    timeout: float | None = field(default=None, kw_only=True)
    cache_lookup: CacheLookup = field(default="use", kw_only=True)
    cache_commit: CacheCommit = field(default="all", kw_only=True)
    cache_salt: str = field(default="", kw_only=True)
    sequence_index: int = field(default=0, kw_only=True)
    requests: tuple[LLMGenerationRequest, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        put = object.__setattr__
        params: object = self.params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError("params", "must be a SamplingParams")
        if self.requests:
            if self.prompt is not None or self.messages is not None:
                raise InvalidRequestError("requests", "a batch has no prompt of its own")
        elif (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("prompt", "give exactly one of prompt and messages")
        if self.prompt is not None and not isinstance(self.prompt, str):
            put(self, "prompt", self._checked_ids(self.prompt))
        if self.messages is not None:
            put(self, "messages", self._checked_messages(self.messages))
        if self.task not in ("generate", "embed"):
            raise InvalidRequestError("task", f"must be 'generate' or 'embed', not {self.task!r}")
        if self.task == "embed" and params.n != 1:
            raise InvalidRequestError("n", "an embedding has one sequence")
        if not isinstance(self.caller, str):
            raise InvalidRequestError("caller", "must be a string")
        self._check_cache_fields()
        checked_integer("priority", self.priority, -(2**31), 2**31 - 1)
        checked_integer("sequence_index", self.sequence_index, 0, MAX_SEQUENCES - 1)
        for name in ("queue_timeout", "first_token_timeout", "timeout"):
            value = getattr(self, name)
            if value is not None:
                put(self, name, checked_number(name, value, 0.0, 1e9, open_low=True))

    def _check_cache_fields(self) -> None:
        for name, values in (
            ("cache_lookup", get_args(CacheLookup)),
            ("cache_commit", get_args(CacheCommit)),
        ):
            value = getattr(self, name)
            if value not in values:
                raise InvalidRequestError(
                    name, f"must be one of {', '.join(values)}, not {value!r}"
                )
        salt: object = self.cache_salt
        if not isinstance(salt, str) or len(salt) > MAX_SALT:
            raise InvalidRequestError(
                "cache_salt", f"must be a string of at most {MAX_SALT} characters"
            )

    @staticmethod
    def _checked_ids(ids: object) -> tuple[int, ...]:
        if isinstance(ids, bytes) or not isinstance(ids, Iterable):
            raise InvalidRequestError("prompt", "must be a string or a list of token ids")
        checked = tuple(checked_integer("prompt", value, 0, 2**31 - 1) for value in ids)
        if not checked:
            raise InvalidRequestError("prompt", "is empty: it has no tokens")
        return checked

    @staticmethod
    def _checked_messages(messages: object) -> tuple[Message, ...]:
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise InvalidRequestError("messages", "must be a list of messages")
        if not messages:
            raise InvalidRequestError("messages", "is empty")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise InvalidRequestError(f"messages[{index}]", "must be a mapping with a role")
        return tuple(messages)

    @classmethod
    def batch(cls, requests: Sequence[LLMGenerationRequest]) -> LLMGenerationRequest:
        """Join single-prompt requests into the seed's several-sequence request, for
        ``handle_request``.
        """
        if not requests:
            raise InvalidRequestError("requests", "is empty")
        for index, request in enumerate(requests):
            if request.requests:
                raise InvalidRequestError(f"requests[{index}]", "must be a single request")
        return cls(requests=tuple(requests))

    def sequences(self) -> tuple[LLMGenerationRequest, ...]:
        """The single-sequence requests this one stands for, in output order.

        A batch is its members in order; ``n`` > 1 is n copies with ``n=1`` and their
        ``sequence_index``. Copies share this request's ``stream_channel``.
        """
        if self.requests:
            return tuple(one for request in self.requests for one in request.sequences())
        if self.params.n == 1:
            return (self,)
        params = replace(self.params, n=1)
        return tuple(
            self._with(params=params, sequence_index=index) for index in range(self.params.n)
        )

    def with_channel(self, channel: StreamChannel) -> LLMGenerationRequest:
        """This request, writing to ``channel``."""
        return self._with(stream_channel=channel)

    def _with(self, **changes: object) -> LLMGenerationRequest:
        """A copy with other fields, which are known to be valid: nothing is checked again."""
        other = object.__new__(LLMGenerationRequest)
        put = object.__setattr__
        for name in _REQUEST_FIELDS:
            put(other, name, changes[name] if name in changes else getattr(self, name))
        return other

    def check_single(self) -> None:
        """Raise UnsupportedRequestError if this is a batch of several prompts."""
        if self.requests:
            raise UnsupportedRequestError("requests", "several prompts: submit them one by one")


_REQUEST_FIELDS = tuple(one.name for one in fields(LLMGenerationRequest))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, and of the likeliest tokens at its position.

    ``top`` is (token id, logprob) in falling order of probability; it always contains ``token_id``,
    last if it is not among the k asked for. Natural logarithms, of the model's distribution before
    bias and penalties.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. ``cached_tokens`` of the prompt were not computed anew."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """One finished sequence. ``token_ids`` include an EOS that ended it; ``text`` is cut at a stop
    string.

    ``stop_reason`` is the stop string or token id that ended it, None for an EOS of the model.
    ``prompt_logprobs`` starts with None: nothing predicts the first token. ``embedding`` is what
    the task "embed" is for: a vector of unit length.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    embedding: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class LLMGenerationResponse:
    """What a request produced: one output per sequence, in order (seed 002)."""

    outputs: tuple[SequenceOutput, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first sequence."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sequence ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Log-probabilities of the first sequence, if asked for."""
        return self.outputs[0].logprobs
