"""What an answer consists of: its reasoning, its content and its tool calls, told apart as it
arrives.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import from_json

from steppe.request import FinishReason
from steppe.text.reasoning.splitter import ReasoningSplitter
from steppe.text.tools.calls import joined_calls
from steppe.text.tools.parser import ToolParser

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from steppe.client import EngineClient
    from steppe.request import SamplingParams
    from steppe.text.reasoning.families import ReasoningFormat
    from steppe.text.tools.calls import CallPart, ToolCall
    from steppe.text.tools.parser import ToolDelta, ToolFormat

__all__ = [
    "AnswerPart",
    "AnswerReader",
    "Interpretation",
    "Message",
    "arguments_of",
    "call_id",
    "call_object",
]

TAIL_TOKENS = 16
"""How many tokens of a prompt may show that reasoning is open, or closed."""


class AnswerPart(NamedTuple):
    """The next of an answer; mostly one of the three."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Interpretation:
    """How every answer to one request is read.

    ``reasoning`` None: nothing is marked. ``tools`` None: nothing is a call. ``offered`` are the
    names of the request's tools. ``single``: no more than the first call is wanted. Which text
    reasoning begins in depends on the end of the prompt, ``prompt_tail``.
    """

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    offered: Collection[str] = ()
    single: bool = False
    prompt_tail: str = ""

    async def after(self, client: EngineClient, prompt: Sequence[int]) -> Interpretation:
        """This, of answers to ``prompt``."""
        if self.reasoning is None:
            return self
        tail = await client.detokenize(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
        return replace(self, prompt_tail=tail)

    def adapted(self, params: SamplingParams) -> SamplingParams:
        """``params`` under which an answer can be read: its marks are in the text, and a form
        begins behind its reasoning.
        """
        if self.tools is not None and self.tools.special:
            params = replace(params, skip_special_tokens=False)
        guided, splitter = params.guided, self._splitter()
        if guided is None or guided.after is not None or self.reasoning is None:
            return params
        # Some templates know marks that their models do not write. Only reasoning that is open, or
        # is the model's habit unless it is switched off, is waited for: else the form comes first.
        expected = self.reasoning.optional and splitter is not None and splitter.may_reason
        if not expected and (splitter is None or not splitter.reasoning):
            return params
        return replace(params, guided=replace(guided, after=self.reasoning.end))

    def reader(self) -> AnswerReader:
        """For one answer."""
        tools = None if self.tools is None else ToolParser(self.tools, self.offered)
        return AnswerReader(self._splitter(), tools, single=self.single)

    def message(self, text: str, reason: FinishReason) -> Message:
        """A whole answer."""
        reader = self.reader()
        parts = [*reader.push(text), *reader.finish(reason)]
        return Message(
            "".join(part.reasoning for part in parts),
            "".join(part.content for part in parts),
            joined_calls(call for part in parts for call in part.calls),
            reader.finish_reason(reason),
        )

    def _splitter(self) -> ReasoningSplitter | None:
        if self.reasoning is None:
            return None
        return ReasoningSplitter(self.reasoning, prompt_tail=self.prompt_tail)


class Message(NamedTuple):
    """A whole answer, read. ``finish_reason`` is OpenAI's."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    finish_reason: str


class AnswerReader:
    """Reads one answer as it arrives: its reasoning first, then its calls. For one thread at a
    time.

    What all pushes and ``finish`` return adds up to the same, whatever way the text is cut.
    """

    def __init__(
        self, splitter: ReasoningSplitter | None, tools: ToolParser | None, *, single: bool
    ) -> None:
        self._splitter = splitter
        self._tools = tools
        self._single = single
        self._begun = 0
        self._calls = 0  # of those, the ones that are delivered
        self._complete = 0

    def push(self, text: str) -> list[AnswerPart]:
        """What ``text`` releases, in order."""
        if self._splitter is None:
            return self._content(text)
        reasoning, content = self._splitter.push(text)
        return [*_thought(reasoning), *self._content(content)]

    def finish(self, reason: FinishReason) -> list[AnswerPart]:
        """The rest, of an answer that ended for ``reason``."""
        parts: list[AnswerPart] = []
        if self._splitter is not None:
            reasoning, content = self._splitter.flush()
            parts = [*_thought(reasoning), *self._content(content)]
        if self._tools is not None:
            truncated = reason is not FinishReason.STOP
            parts += self._parts(self._tools.flush(truncated=truncated))
        return parts

    def finish_reason(self, reason: FinishReason) -> str:
        """OpenAI's name for the end: an answer that was cut off is never a finished call."""
        whole = 0 < self._calls == self._complete
        return "tool_calls" if whole and reason is FinishReason.STOP else str(reason)

    def _content(self, text: str) -> list[AnswerPart]:
        if not text:
            return []
        if self._tools is None:
            return [AnswerPart(content=text)]
        return self._parts(self._tools.push(text))

    def _parts(self, deltas: Iterable[ToolDelta]) -> list[AnswerPart]:
        parts = []
        for content, found in deltas:
            calls = []
            for call in found:
                self._begun += bool(call.name)
                if not self._single or self._begun == 1:
                    calls.append(call)
                    self._calls += bool(call.name)
                    self._complete += call.complete
            if content or calls:
                parts.append(AnswerPart(content=content, calls=tuple(calls)))
        return parts


def _thought(text: str) -> list[AnswerPart]:
    return [AnswerPart(reasoning=text)] if text else []


def call_object(call: ToolCall | CallPart) -> dict[str, Any]:
    """A call as the OpenAI API has it, with an id of its own."""
    return {
        "id": call_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def call_id() -> str:
    """A new id for a call."""
    return f"call_{uuid.uuid4().hex}"


def arguments_of(call: ToolCall | CallPart) -> dict[str, Any]:
    """The arguments as an object: what is there of them, if they were cut off."""
    if call.complete:
        value: dict[str, Any] = json.loads(call.arguments)
        return value
    try:
        partial = from_json(call.arguments, allow_partial=True)
    except ValueError:
        return {}  # the model wrote no JSON
    return partial if isinstance(partial, dict) else {}
