"""``/v1/responses``: the request, and the chat completion that it amounts to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from steppe.errors import InvalidRequestError, UnsupportedRequestError
from steppe.server.protocol.chat import ChatCompletionRequest
from steppe.server.protocol.common import SamplingFields, Strict

__all__ = ["NamedFunction", "ResponsesRequest"]

Name = Annotated[str, Field(min_length=1, max_length=256)]
TEXTS = frozenset({"input_text", "output_text", "text", "reasoning_text"})


class Part(BaseModel):
    """A part of a message; what else it has is of no effect here."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None


class Item(BaseModel):
    """One item of a conversation. What it must have depends on its type."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Strict):
    """A ``tool_choice`` that names its function."""

    type: Literal["function"]
    name: Name


class TextFormat(Strict):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class Text(Strict):
    """How the answer is written. ``verbosity`` has no effect here."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(BaseModel):
    """How much the model reasons, in the words that its template knows."""

    model_config = ConfigDict(extra="allow", strict=True)

    effort: str | None = None


class ResponsesRequest(SamplingFields):
    """A request for one response. The last group of fields is accepted and has no effect here."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    text: Text | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: None = Field(None, description="Nothing is stored here.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Computed prefixes are shared only with requests of the same salt.",
    )

    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """What this API calls the fields of a chat completion."""
        names = {"response_format": "text.format", "prompt": "input", "messages": "input"}
        if self.max_output_tokens is not None:
            names["max_tokens"] = "max_output_tokens"
        return names

    def chat(self) -> ChatCompletionRequest:
        """The same as a chat completion. Raises InvalidRequestError naming the field,
        UnsupportedRequestError for content that is not text.
        """
        if self.n not in (None, 1):
            raise UnsupportedRequestError("n", "a response has one answer")
        fields: dict[str, Any] = {name: getattr(self, name) for name in SamplingFields.model_fields}
        if self.max_output_tokens is not None:
            fields["max_tokens"] = self.max_output_tokens
        form = self.text.format if self.text is not None else None
        if form is not None:
            if self.response_format is not None:
                raise InvalidRequestError("response_format", "is given beside text.format")
            fields["response_format"] = {
                "type": form.type,
                "json_schema": {"schema": form.schema_} if form.type == "json_schema" else None,
            }
        if self.tools:
            fields["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"})}
                for tool in self.tools
            ]
        choice = self.tool_choice
        if isinstance(choice, NamedFunction):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif self.tools or choice == "required":
            fields["tool_choice"] = choice
        fields |= {
            "messages": self._turns(),
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "chat_template_kwargs": self.chat_template_kwargs,
            "cache_salt": self.cache_salt,
        }
        return ChatCompletionRequest.model_validate(fields)

    def _turns(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = []
        if self.instructions is not None:
            turns.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*turns, {"role": "user", "content": self.input}]
        for index, item in enumerate(self.input):
            field = f"input[{index}]"
            if item.type == "function_call_output":
                content = _text(item.output, f"{field}.output")
                call = _given(item.call_id, f"{field}.call_id")
                turns.append({"role": "tool", "tool_call_id": call, "content": content})
            elif item.type in ("function_call", "reasoning"):
                # The items of one answer of the model are one turn of it.
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant", "content": ""})
                if item.type == "reasoning":
                    turns[-1]["reasoning_content"] = _text(item.content or "", f"{field}.content")
                else:
                    turns[-1].setdefault("tool_calls", []).append(_call(item, field))
            elif item.type == "message":
                content = _text(item.content, f"{field}.content")
                role = _given(item.role, f"{field}.role")
                last = turns[-1] if turns else {}
                if role == last.get("role") == "assistant" and not last["content"]:
                    last["content"] = content
                else:
                    turns.append({"role": role, "content": content})
            else:
                raise UnsupportedRequestError(f"{field}.type", f"{item.type[:40]!r} is unknown")
        return turns


def _call(item: Item, field: str) -> dict[str, Any]:
    function = {
        "name": _given(item.name, f"{field}.name"),
        "arguments": _given(item.arguments, f"{field}.arguments"),
    }
    call = _given(item.call_id, f"{field}.call_id")
    return {"id": call, "type": "function", "function": function}


def _text(content: str | list[Part] | None, field: str) -> str:
    if content is None:
        raise InvalidRequestError(field, "is required")
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        where = f"{field}[{index}]"
        if part.type not in TEXTS:
            raise UnsupportedRequestError(
                f"{where}.type", f"{part.type[:40]!r} content is not supported here; only text is"
            )
        texts.append(_given(part.text, f"{where}.text"))
    return "".join(texts)


def _given(value: str | None, field: str) -> str:
    if value is None:
        raise InvalidRequestError(field, "is required")
    return value
