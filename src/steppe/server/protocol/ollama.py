"""Ollama's requests, and the chat completions that they amount to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from steppe.errors import ContextLengthError, InvalidRequestError, UnsupportedRequestError
from steppe.server.protocol.chat import MAX_TOP_LOGPROBS, ChatCompletionRequest, Tool
from steppe.server.protocol.common import SamplingFields, Strict

if TYPE_CHECKING:
    from steppe.client import ModelCard
    from steppe.request import SamplingParams

__all__ = ["NamedModel", "OllamaChatRequest", "OllamaEmbedRequest", "OllamaGenerateRequest"]

UNLIMITED = (-1, -2)
"""How ``num_predict`` says that the context is the only limit."""
OFF: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "tfs_z": (0, 1),
    "typical_p": (0, 1),
    "penalize_newline": (True,),
}
"""Options that this engine does not have, and the values that ask for nothing of them."""


class NamedModel(Strict):
    """A request about a model. ``verbose`` shows nothing more here."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None

    def named(self) -> str:
        """The model's name. Raises InvalidRequestError without one."""
        name = self.model or self.name
        if not name:
            raise InvalidRequestError("model", "is required")
        return name


class Options(SamplingFields):
    """How an answer is sampled, in Ollama's words or in ours.

    The last group says how a model is loaded or run, which was decided when the server started: it
    changes nothing here.
    """

    num_predict: int | None = Field(None, ge=-2, description="-1 or -2: up to the context.")
    num_ctx: int | None = Field(None, ge=1, description="Most tokens of prompt and answer.")
    repeat_penalty: float | None = None
    repeat_last_n: int | None = Field(None, ge=-1)
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    penalize_newline: bool | None = None

    embedding_only: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    low_vram: bool | None = None
    main_gpu: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_keep: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    use_mlock: bool | None = None
    use_mmap: bool | None = None
    vocab_only: bool | None = None

    def fields(self, card: ModelCard) -> dict[str, Any]:
        """The same as fields of a chat completion. Raises InvalidRequestError naming the option,
        UnsupportedRequestError for one that this server cannot follow.
        """
        for name, harmless in OFF.items():
            if (value := getattr(self, name)) is not None and value not in harmless:
                raise UnsupportedRequestError(f"options.{name}", "is not supported here")
        if self.num_ctx is not None and self.num_ctx > card.context_length:
            raise UnsupportedRequestError(
                "options.num_ctx",
                f"is {self.num_ctx}, and this server was started with {card.context_length}",
            )
        if self.n not in (None, 1):
            raise UnsupportedRequestError("options.n", "there is one answer here")
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        if self.num_predict is not None:
            if self.max_tokens is not None or self.num_predict == 0:
                raise InvalidRequestError("options.num_predict", "must be -1 or at least 1, alone")
            if self.num_predict not in UNLIMITED:
                given["max_tokens"] = self.num_predict
        if self.seed == -1:
            given["seed"] = None  # there it means any
        if self.repeat_penalty is not None:
            if self.repetition_penalty is not None:
                raise InvalidRequestError("options.repeat_penalty", "has two values")
            given["repetition_penalty"] = self.repeat_penalty
        penalty = given["repetition_penalty"]
        if self.repeat_last_n == 0:
            given["repetition_penalty"] = 1.0
        elif penalty not in (None, 1.0) and self.repeat_last_n not in (None, -1):
            raise UnsupportedRequestError(
                "options.repeat_last_n", "must be -1 or 0: a penalty looks back to the beginning"
            )
        return given

    def within(self, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """``params`` of an answer that ends where ``num_ctx`` does, or at the context if it is to
        be unlimited. Raises ContextLengthError (``prompt``).
        """
        if self.num_predict in UNLIMITED:
            params = replace(params, max_tokens=None)
        if self.num_ctx is None:
            return params
        room = self.num_ctx - prompt_tokens
        if room < 1:
            raise ContextLengthError(
                "prompt",
                f"has {prompt_tokens} tokens, and options.num_ctx is {self.num_ctx}",
                needed=prompt_tokens + 1,
                available=self.num_ctx,
            )
        asked = params.max_tokens
        return replace(params, max_tokens=room if asked is None else min(asked, room))

    @property
    def names(self) -> dict[str, str]:
        """What these options call the fields of a chat completion."""
        names = {name: f"options.{name}" for name in SamplingFields.model_fields}
        if self.max_tokens is None:
            names["max_tokens"] = "options.num_predict"
        if self.repetition_penalty is None:
            names["repetition_penalty"] = "options.repeat_penalty"
        return {**names, "response_format": "format"}


class Answering(Strict):
    """What both requests have. The last group is accepted and has no effect here: the model stays
    as long as the server does, and what is too long is refused instead of being cut.
    """

    model: str = Field(min_length=1)
    stream: bool = True
    options: Options | None = None
    format: str | dict[str, Any] | None = Field(None, description='"json" or a JSON schema.')
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    keep_alive: float | str | None = None
    shift: bool | None = None
    truncate: bool | None = None

    @property
    def settings(self) -> Options:
        """The options, or none of them."""
        return self.options or Options.model_validate({})

    @property
    def unload(self) -> bool:
        """Whether ``keep_alive`` asks for the model to be dropped."""
        alive = self.keep_alive
        digits = alive.rstrip("hmsun") if isinstance(alive, str) else alive
        return digits in ("0", 0)

    def refuse_unloading(self) -> None:
        """Raise UnsupportedRequestError if a request without a prompt asks for that."""
        if self.unload:
            raise UnsupportedRequestError("keep_alive", "the model stays as long as the server")

    def _completion(self, card: ModelCard, **more: Any) -> ChatCompletionRequest:
        fields = {**self.settings.fields(card), **more}
        if self.format:
            if fields["response_format"] is not None:
                raise InvalidRequestError("options.response_format", "is given beside format")
            if isinstance(self.format, dict):
                wrapped = {"type": "json_schema", "json_schema": {"schema": self.format}}
                fields["response_format"] = wrapped
            elif self.format == "json":
                fields["response_format"] = {"type": "json_object"}
            else:
                raise InvalidRequestError("format", 'must be "json" or a JSON schema')
        if self.think and card.reasoning is None:
            raise UnsupportedRequestError("think", f"{card.name} does not mark its reasoning")
        if self.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": bool(self.think)}
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        fields |= {"model": self.model, "logprobs": self.logprobs}
        fields["top_logprobs"] = self.top_logprobs
        return ChatCompletionRequest.model_validate(fields)


class CalledFunction(BaseModel):
    """The function of an earlier call."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(min_length=1)
    arguments: dict[str, Any] | None = None


class EarlierCall(BaseModel):
    """A call that the model made earlier."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: str | None = None
    function: CalledFunction


class OllamaMessage(BaseModel):
    """One turn. Fields beyond these reach the template, which alone knows what it reads."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def turn(self, field: str) -> dict[str, Any]:
        """As the OpenAI API has it."""
        _refuse_images(self.images, f"{field}.images")
        turn = self.model_dump(exclude_none=True, exclude={"thinking", "images", "tool_name"})
        turn.setdefault("content", "" if self.tool_calls is None else None)
        if self.thinking:
            turn["reasoning_content"] = self.thinking
        if self.tool_name is not None:
            turn["name"] = self.tool_name
        if self.tool_calls is not None:
            turn["tool_calls"] = [
                {
                    "id": call.id or f"call_{index}",
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments or {},
                    },
                }
                for index, call in enumerate(self.tool_calls)
            ]
        return turn


class OllamaChatRequest(Answering):
    """A conversation. Without messages it only asks whether the model is there."""

    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None

    def chat(self, card: ModelCard) -> ChatCompletionRequest:
        """The same as a chat completion. Raises InvalidRequestError naming the field,
        UnsupportedRequestError for what this server cannot do.
        """
        turns = [one.turn(f"messages[{i}]") for i, one in enumerate(self.messages or ())]
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return self._completion(card, messages=turns, tools=tools or None)


class OllamaGenerateRequest(Answering):
    """One prompt, put through the chat template unless it is ``raw``. Without a prompt it only
    asks whether the model is there.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None

    def chat(self, card: ModelCard) -> ChatCompletionRequest:
        """The same as a chat completion, raw or not. Raises InvalidRequestError naming the field,
        UnsupportedRequestError for what this server cannot do.
        """
        _refuse_images(self.images, "images")
        if self.suffix:
            raise UnsupportedRequestError("suffix", "text cannot be inserted, only continued")
        if self.template:
            raise UnsupportedRequestError("template", "the model's own is used; or send raw")
        if self.context:
            raise UnsupportedRequestError("context", "is no longer kept: send a chat's messages")
        if self.raw and (self.system or self.think):
            field = "system" if self.system else "think"
            raise UnsupportedRequestError(field, "a raw prompt is sent as it is")
        turns = [{"role": "user", "content": self.prompt or ""}]
        if self.system:
            turns.insert(0, {"role": "system", "content": self.system})
        return self._completion(card, messages=turns)


class OllamaEmbedRequest(Strict):
    """Texts to embed. ``truncate`` has no effect: what is too long is refused."""

    model: str = Field(min_length=1)
    input: str | list[str] | None = None
    prompt: str | None = None
    dimensions: int | None = Field(None, ge=1)
    options: Options | None = None
    keep_alive: float | str | None = None
    truncate: bool | None = None


def _refuse_images(images: list[str] | None, field: str) -> None:
    if images:
        raise UnsupportedRequestError(field, "are not supported here; only text is")
