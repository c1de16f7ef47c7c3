"""Reasoning and content, separated while they arrive."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from steppe.text.tags import partial_tag

if TYPE_CHECKING:
    from steppe.text.reasoning.families import ReasoningFormat

__all__ = ["ReasoningDelta", "ReasoningSplitter"]


class ReasoningDelta(NamedTuple):
    """Text that may be delivered now, by what it is."""

    reasoning: str
    content: str


class _Part(Enum):
    UNDECIDED = "undecided"
    """Nothing but white space so far: the answer may still begin with reasoning."""
    REASONING = "reasoning"
    CONTENT = "content"


class ReasoningSplitter:
    """Splits one answer. For one thread at a time.

    Reasoning comes first or not at all: a mark that stands further back is content like any other.
    ``prompt_tail`` is the end of the prompt, as text with its marks. A template may have opened the
    reasoning for the model, or opened and closed it to have none.

    The marks are left out, and so is the white space after each. Whatever way a text is cut into
    pushes, all that they and ``flush`` return adds up to the same; held back is what may turn out
    to be a mark, and white space before it is known what it belongs to.
    """

    __slots__ = ("_format", "_held", "_part", "_skips_space")

    def __init__(self, form: ReasoningFormat, *, prompt_tail: str = "") -> None:
        self._format = form
        self._held = ""
        self._skips_space = False
        self._part = _Part.UNDECIDED
        tail = prompt_tail.rstrip()
        if tail.endswith(form.start):
            self._enter(_Part.REASONING)
        elif tail.endswith(form.end):
            self._enter(_Part.CONTENT)

    @property
    def reasoning(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return self._part is _Part.REASONING

    @property
    def may_reason(self) -> bool:
        """Whether more reasoning may come, as far as is known."""
        return self._part is not _Part.CONTENT

    def push(self, text: str) -> ReasoningDelta:
        """What ``text`` releases."""
        self._held += text
        reasoning = content = ""
        if self._part is _Part.UNDECIDED:
            self._decide()
        if self._part is _Part.REASONING:
            reasoning = self._reason()
        if self._part is _Part.CONTENT:
            content = self._skip_space(self._held)
            self._held = ""
        return ReasoningDelta(reasoning, content)

    def flush(self) -> ReasoningDelta:
        """The rest, at the end of the answer. Reasoning that never ended stays reasoning."""
        text, self._held = self._held, ""
        if self._part is _Part.REASONING:
            return ReasoningDelta(self._skip_space(text), "")
        return ReasoningDelta("", self._skip_space(text))

    def _enter(self, part: _Part) -> None:
        self._part = part
        self._skips_space = True

    def _decide(self) -> None:
        start = self._format.start
        text = self._held.lstrip()
        if text.startswith(start):
            self._held = text[len(start) :]
            self._enter(_Part.REASONING)
        elif not start.startswith(text):
            self._part = _Part.CONTENT  # its white space is its own

    def _reason(self) -> str:
        text = self._held
        at = text.find(self._format.end)
        if at >= 0:
            self._held = text[at + len(self._format.end) :]
            said = self._skip_space(text[:at])
            self._enter(_Part.CONTENT)
            return said
        safe = len(text) - partial_tag(text, self._format.end)
        self._held = text[safe:]
        return self._skip_space(text[:safe])

    def _skip_space(self, text: str) -> str:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text
