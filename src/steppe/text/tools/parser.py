"""Calls and content, separated while they arrive."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from steppe.text.tags import partial_tag
from steppe.text.tools.calls import CallPart, JsonEnd, call_head, read_calls

if TYPE_CHECKING:
    from collections.abc import Collection

    from steppe.text.tools.calls import ToolCall

__all__ = ["ToolDelta", "ToolFormat", "ToolParser"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes calls: JSON between two tags.

    ``start`` empty: there is no tag, the answer is the call. ``end`` empty: a call ends with its
    JSON. ``bare``: an answer may also begin with the JSON, without a tag; it is a call then only if
    a tool of that name was offered. ``between`` are characters, beside white space, that separate
    calls. ``special``: a tag is a control token, so the request must keep those in its text
    (``skip_special_tokens`` false).
    """

    name: str
    start: str
    end: str = ""
    bare: bool = False
    between: str = ""
    special: bool = False


class ToolDelta(NamedTuple):
    """What may be delivered now: content, or parts of calls, one call after the other."""

    content: str = ""
    calls: tuple[CallPart, ...] = ()


@dataclass(slots=True)
class _Call:
    """A call that has begun in the text that is held: where its JSON may start, and does.

    ``told`` is where the arguments begin that are not delivered yet, once its name is: from then on
    it is a call, whatever follows.
    """

    after_tag: int
    start: int | None = None
    end: int | None = None
    scanner: JsonEnd = field(default_factory=JsonEnd)
    name: str = ""
    told: int | None = None
    arguments: int = 0
    arguments_end: int | None = None
    arguments_scanner: JsonEnd = field(default_factory=JsonEnd)


class ToolParser:
    """Finds the calls of one answer. For one thread at a time.

    A call whose name comes first is delivered while its arguments arrive, to the letter; but the
    bracket that ends them is held back until the call is complete. If it never is, or is no JSON
    after all, its arguments stay without their end, and the rest of it is content. A call in any
    other order is delivered when it is complete, and is content, to the letter, if it never is.
    White space around calls is left out when there is nothing else. Whatever way a text is cut into
    pushes, all that they and ``flush`` return adds up to the same content and the same calls.

    ``offered`` are the names of the request's tools.
    """

    __slots__ = ("_bare", "_call", "_fresh", "_held", "_offered", "_parts", "form", "found")

    def __init__(self, form: ToolFormat, offered: Collection[str] = ()) -> None:
        self.form = form
        self._offered = frozenset(offered)
        self._held = ""
        self._fresh = True  # since the start, or the last call, there was nothing but white space
        self._bare = form.bare or not form.start
        self._call: _Call | None = None
        self._parts: list[ToolDelta] = []
        self.found = 0
        """Calls delivered so far, or begun."""

    @property
    def pending(self) -> bool:
        """Whether a call has begun and is not complete."""
        return self._call is not None

    def push(self, text: str) -> list[ToolDelta]:
        """What ``text`` releases, in order."""
        self._held += text
        while self._read_call() if self._call is not None else self._read_content():
            pass
        return self._released()

    def flush(self, *, truncated: bool = False) -> list[ToolDelta]:
        """The rest, at the end of the answer. ``truncated``: it was cut off (``length``, an error),
        so a call without its end is none; else a missing end tag is forgiven.
        """
        call, text = self._call, self._held
        if call is not None and call.end is not None and not truncated:
            calls = self._calls_in(text, call)
            if calls is not None and self.form.end.startswith(text[call.end :].strip()):
                self._deliver(call, calls)
                text = ""
        if call is not None and call.told is not None and text:
            # What was told of it stays; nobody can take the rest for a call.
            text = text[call.told :]
            self._fresh = False
        self._held = ""
        self._call = None
        if not (self._fresh and self.found and not text.strip()):
            self._say(text)
        return self._released()

    # ---- steps: each consumes some of what is held, and returns whether another may follow -------

    def _read_content(self) -> bool:
        text, start = self._held, self.form.start
        blank = self._blank_prefix(text) if self._fresh else 0
        if self._fresh and blank == len(text):
            return False
        if self._fresh and self._bare and text[blank] in "{[":
            # The bracket may also be the tag's own.
            if start and start.startswith(text[blank:]):
                return False
            if not (start and text.startswith(start, blank)):
                self._call = _Call(blank)
                return True
        at = text.find(start) if start else -1
        if at >= 0:
            if not (self._fresh and blank >= at):
                self._say(text[:at])
                text = text[at:]
                at = 0
            self._held = text
            self._call = _Call(at + len(start))
            return True
        safe = len(text) - (partial_tag(text, start) if start else 0)
        if not (self._fresh and blank >= safe):
            self._say(text[:safe])
            self._held = text[safe:]
        return False

    def _read_call(self) -> bool:
        call, text = self._call, self._held
        assert call is not None
        if call.start is None:
            body = text[call.after_tag :]
            start = call.after_tag + len(body) - len(body.lstrip())
            if start == len(text):
                return False
            if text[start] not in "{[":
                return self._give_up(call)
            call.start = start
        if call.end is None:
            call.end = call.scanner.find(text, call.start)
            self._tell(call)
            if call.end is None:
                return False
        calls = self._calls_in(text, call)
        if calls is None:
            return self._give_up(call)
        end = self.form.end if self._tagged(call) else ""
        rest = text[call.end :].lstrip() if end else text[call.end :]
        if not rest.startswith(end):
            return False if end.startswith(rest) else self._give_up(call)
        self._deliver(call, calls)
        self._held = rest[len(end) :]
        self._call = None
        return bool(self._held)

    def _give_up(self, call: _Call) -> bool:
        """What began as a call is content, at least through its tag, or what is left of it."""
        if call.told is not None:
            self._say(self._held[call.told : call.end])
            self._held = self._held[call.end :]
            self._call = None
            return bool(self._held)
        through = max(call.after_tag, 1)
        if not self._tagged(call):
            through = call.after_tag + 1
        self._say(self._held[:through])
        self._held = self._held[through:]
        self._call = None
        return bool(self._held)

    def _tell(self, call: _Call) -> None:
        """Deliver what has arrived of the arguments, but for their end."""
        text = self._held
        assert call.start is not None
        if call.told is None:
            head = call_head(text, call.start)
            if head is None or not self._allowed(call, head[0]):
                return
            call.name, call.arguments = head
            call.told = call.arguments
            self.found += 1
            self._parts.append(ToolDelta(calls=(CallPart(name=call.name),)))
        if call.arguments_end is None:
            call.arguments_end = call.arguments_scanner.find(text, call.arguments)
        safe = len(text) if call.arguments_end is None else call.arguments_end - 1
        if safe > call.told:
            self._parts.append(ToolDelta(calls=(CallPart(arguments=text[call.told : safe]),)))
            call.told = safe

    # ---- helpers ---------------------------------------------------------------------------------

    def _tagged(self, call: _Call) -> bool:
        start = self.form.start
        return bool(start) and self._held[: call.after_tag].endswith(start)

    def _calls_in(self, text: str, call: _Call) -> tuple[ToolCall, ...] | None:
        """The calls that the JSON of ``call`` stands for; None if they are none, or others than
        were delivered already.
        """
        calls = read_calls(text[call.start : call.end])
        if calls is None or not all(self._allowed(call, one.name) for one in calls):
            return None
        if call.told is not None:
            arguments = text[call.arguments : call.arguments_end]
            told = f'{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}'
            return calls if calls == read_calls(told) else None
        return calls

    def _allowed(self, call: _Call, name: str) -> bool:
        """Without a tag it is a call only by the name of a tool; or if it must be one."""
        return self._tagged(call) or not self.form.start or name in self._offered

    def _blank_prefix(self, text: str) -> int:
        between = self.form.between if self.found else ""
        for index, char in enumerate(text):
            if not (char.isspace() or char in between):
                return index
        return len(text)

    def _deliver(self, call: _Call, calls: tuple[ToolCall, ...]) -> None:
        if call.told is None:
            self.found += len(calls)
            parts = tuple(CallPart(one.name, one.arguments, complete=True) for one in calls)
        else:
            rest = self._held[call.told : call.arguments_end]
            parts = (CallPart(arguments=rest, complete=True),)
        self._parts.append(ToolDelta(calls=parts))
        self._fresh = True

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(ToolDelta(text))
            self._fresh = False
            self._bare = False

    def _released(self) -> list[ToolDelta]:
        parts, self._parts = self._parts, []
        return parts
