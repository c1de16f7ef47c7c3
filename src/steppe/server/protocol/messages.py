"""``/v1/messages``: Anthropic's request, and the chat completion that it amounts to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from steppe.errors import InvalidRequestError, UnsupportedRequestError
from steppe.server.protocol.chat import ChatCompletionRequest
from steppe.server.protocol.common import SamplingFields, Strict

__all__ = ["CountTokensRequest", "MessagesRequest"]

Name = Annotated[str, Field(min_length=1, max_length=256)]


class Block(BaseModel):
    """A part of a message. What it must have depends on its type; the rest (``cache_control``,
    ``citations``) has no effect here.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class Turn(Strict):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class ClientTool(BaseModel):
    """A tool that the client runs; the server runs none."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Strict):
    """Whether a tool is used, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    """Whether the model reasons. How much has no effect here."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["enabled", "disabled", "adaptive"]


class CountTokensRequest(Strict):
    """A conversation. Where the template lets a request choose, there is no reasoning unless
    ``thinking`` asks for it.
    """

    messages: list[Turn]
    model: str
    system: str | list[Block] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    def chat(self, **more: Any) -> ChatCompletionRequest:
        """The same as a chat completion, with ``more`` of its fields. Raises InvalidRequestError
        naming the field, UnsupportedRequestError for content that is not text.
        """
        turns: list[dict[str, Any]] = []
        if self.system is not None:
            turns.append({"role": "system", "content": _text(self.system, "system")})
        for index, turn in enumerate(self.messages):
            turns += _turns(turn, f"messages[{index}].content")
        if self.messages and self.messages[-1].role == "assistant":
            raise UnsupportedRequestError(
                "messages", "the last turn must be the user's: an answer cannot be continued"
            )
        fields: dict[str, Any] = {
            "messages": turns,
            "model": self.model,
            "chat_template_kwargs": {
                "enable_thinking": self.thinking is not None and self.thinking.type != "disabled"
            },
            **more,
        }
        if self.tools:
            fields["tools"] = [_tool(one) for one in self.tools]
        choice = self.tool_choice
        if choice is not None:
            fields["tool_choice"] = _choice(choice)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return ChatCompletionRequest.model_validate(fields)


class MessagesRequest(CountTokensRequest, SamplingFields):
    """A request for one message. The last three fields have no effect here."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None

    def chat(self, **more: Any) -> ChatCompletionRequest:
        if self.n not in (None, 1):
            raise UnsupportedRequestError("n", "a message has one answer")
        if self.stop is not None and self.stop_sequences is not None:
            raise InvalidRequestError("stop", "is given beside stop_sequences")
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        if self.stop_sequences is not None:
            given["stop"] = self.stop_sequences
        return super().chat(**given, **more)


def _turns(turn: Turn, field: str) -> list[dict[str, Any]]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_assistant(turn.content, field)]
    results: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for index, block in enumerate(turn.content):
        where = f"{field}[{index}]"
        if block.type == "tool_result":
            content = _text(block.content or "", f"{where}.content")
            call = _given(block.tool_use_id, f"{where}.tool_use_id")
            results.append({"role": "tool", "tool_call_id": call, "content": content})
        else:
            texts.append({"type": "text", "text": _text_of(block, where)})
    if texts or not results:
        results.append({"role": "user", "content": texts})
    return results


def _assistant(blocks: list[Block], field: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        where = f"{field}[{index}]"
        if block.type == "tool_use":
            function = {"name": _given(block.name, f"{where}.name"), "arguments": block.input or {}}
            call = {"id": _given(block.id, f"{where}.id"), "type": "function"}
            calls.append({**call, "function": function})
        elif block.type == "thinking":
            thoughts.append(_given(block.thinking, f"{where}.thinking"))
        elif block.type != "redacted_thinking":  # nobody can read that
            texts.append(_text_of(block, where))
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _text(content: str | list[Block], field: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_of(block, f"{field}[{i}]") for i, block in enumerate(content))


def _text_of(block: Block, field: str) -> str:
    if block.type != "text":
        raise UnsupportedRequestError(
            f"{field}.type", f"{block.type[:40]!r} content is not supported here; only text is"
        )
    return _given(block.text, f"{field}.text")


def _given(value: str | None, field: str) -> str:
    if value is None:
        raise InvalidRequestError(field, "is required")
    return value


def _tool(tool: ClientTool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        name = _given(choice.name, "tool_choice.name")
        return {"type": "function", "function": {"name": name}}
    return "required" if choice.type == "any" else choice.type
