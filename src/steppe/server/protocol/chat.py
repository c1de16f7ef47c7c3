"""``/v1/chat/completions``: the request, and its conversation as a template expects it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from steppe.errors import InvalidRequestError
from steppe.request import Guided
from steppe.server.interpretation import Interpretation
from steppe.server.protocol.common import SamplingFields, StreamOptions, Strict
from steppe.text.tools.families import FORCED, forced_call_schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from steppe.client import ModelCard
    from steppe.request import SamplingParams
    from steppe.text.tools.parser import ToolFormat

__all__ = [
    "ChatCompletionRequest",
    "ChatMessage",
    "Tool",
    "template_messages",
    "template_variables",
]

MAX_TOP_LOGPROBS = 50
RESERVED = frozenset(
    {"messages", "tools", "documents", "bos_token", "eos_token", "add_generation_prompt"}
    | {"parse_special", "guard", "template", "tokenizer", "self"}
)
"""Names that a template is given anyway, or that its callers need for themselves."""


class ChatMessage(BaseModel):
    """One turn. Fields beyond these reach the template, which alone knows what it reads."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; only functions exist."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The name in a ``tool_choice``."""

    name: str


class NamedTool(Strict):
    """A ``tool_choice`` that names its function."""

    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(SamplingFields):
    """A chat completion. The last group of fields is accepted and has no effect here."""

    messages: list[ChatMessage]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Computed prefixes are shared only with requests of the same salt.",
    )

    modalities: list[Literal["text"]] | None = None
    metadata: dict[str, str] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None
    verbosity: str | None = None

    def params(self, defaults: Mapping[str, int | float]) -> SamplingParams:
        """The sampling parameters. Raises InvalidRequestError naming the field."""
        if (
            self.max_completion_tokens is not None
            and self.max_tokens is not None
            and self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidRequestError("max_completion_tokens", "differs from max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
        return self.sampling(
            defaults,
            max_tokens=self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            guided=self.form(),
        )

    @property
    def call_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def form_field(self) -> str | None:
        """As for any request, but for a forced call: that leaves no room for a response format."""
        if self.tool_choice not in (None, "none") and not self.tools:
            raise InvalidRequestError("tool_choice", "needs tools")
        field = super().form_field()
        if not self.call_forced:
            return field
        if field not in (None, "response_format"):
            raise InvalidRequestError("tool_choice", f"asks for a form beside {field}")
        return "tool_choice"

    def form(self) -> Guided | None:
        """The form of the answer; of a call, if that is forced."""
        if self.form_field() != "tool_choice":
            return super().form()
        tools = self.template_tools() or []
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return Guided(json_schema=forced_call_schema(tools, name))

    def interpretation(self, card: ModelCard) -> Interpretation:
        """How the answer of that model is read. A form leaves no room for a call of the model's own
        accord.
        """
        tools = self.template_tools()
        form: ToolFormat | None = None
        if tools and self.call_forced:
            form = FORCED
        elif tools and self.form_field() is None:
            form = card.tools
        return Interpretation(
            reasoning=card.reasoning,
            tools=form,
            offered=frozenset(tool["function"]["name"] for tool in tools or ()),
            single=self.parallel_tool_calls is False,
        )

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools, as the template is given them; none under ``tool_choice`` none."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def template_variables(self) -> dict[str, Any]:
        """What else the template is given. Raises InvalidRequestError for a reserved name."""
        variables = template_variables(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return variables


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables for a template. Raises InvalidRequestError for a name that is not free."""
    for name in given or ():
        if not name.isidentifier() or name in RESERVED:
            raise InvalidRequestError("chat_template_kwargs", f"{name[:40]!r} is reserved")
    return dict(given or {})


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The conversation in the form that chat templates are written for.

    ``developer`` is what newer clients call ``system``. The arguments of earlier tool calls travel
    as JSON text and are read as objects by templates.
    """
    plain = []
    for message in messages:
        turn = message.model_dump(exclude_none=True)
        if turn["role"] == "developer":
            turn["role"] = "system"
        if "tool_calls" in turn:
            turn["tool_calls"] = [_opened(call) for call in turn["tool_calls"]]
        plain.append(turn)
    return plain


def _opened(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call  # what the model once wrote, however wrong, is shown to it as it was
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
