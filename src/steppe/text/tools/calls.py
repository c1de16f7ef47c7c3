"""What a tool call is, and how one is read from JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CallPart", "JsonEnd", "ToolCall", "call_head", "joined_calls", "read_calls"]

_S = r"[ \t\r\n]*"
HEAD = re.compile(
    rf'\{{{_S}"name"{_S}:{_S}(?P<name>"(?:[^"\\\x00-\x1f]|\\.)+"){_S},'
    rf'{_S}"(?:arguments|parameters)"{_S}:{_S}(?=\{{)'
)
"""How a call begins whose arguments can be told while they arrive."""
HEAD_LIMIT = 1024
"""Characters in which that must be found; it is looked for again with every piece of a text."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. ``arguments`` is the text of a JSON object, or its beginning if it is not
    ``complete``.
    """

    name: str
    arguments: str
    complete: bool = True


class CallPart(NamedTuple):
    """The next of a call: its ``name`` with the first part, ``complete`` with the last one.

    The arguments of all parts of a call add up to a JSON object if the last is complete, and to no
    JSON otherwise.
    """

    name: str = ""
    arguments: str = ""
    complete: bool = False


def joined_calls(parts: Iterable[CallPart]) -> tuple[ToolCall, ...]:
    """The calls that parts add up to."""
    calls: list[list[CallPart]] = []
    for part in parts:
        if part.name:
            calls.append([])
        calls[-1].append(part)
    return tuple(
        ToolCall(call[0].name, "".join(part.arguments for part in call), call[-1].complete)
        for call in calls
    )


def call_head(text: str, start: int) -> tuple[str, int] | None:
    """The name of the call that begins at ``start``, and where its arguments, an object, begin;
    None while that is not known, or where a call is written in another order.
    """
    head = HEAD.match(text, start, start + HEAD_LIMIT)
    if head is None:
        return None
    try:
        return json.loads(head["name"]), head.end()
    except ValueError:
        return None


def read_calls(text: str) -> tuple[ToolCall, ...] | None:
    """The calls that a JSON object, or an array of them, stands for; None if it is no such thing.

    A call is an object with a ``name`` and ``arguments`` (``parameters`` in some families): an
    object, the text of one, or nothing. Some wrap it in ``function``.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    items = value if isinstance(value, list) else [value]
    calls = [_read_call(item) for item in items]
    if not calls or None in calls:
        return None
    return tuple(call for call in calls if call is not None)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _read_call(item: object) -> ToolCall | None:
    if not isinstance(item, dict):
        return None
    inner = item.get("function")
    call = inner if "name" not in item and isinstance(inner, dict) else item
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return None
    arguments: object = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse) if arguments else {}
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None  # a number like 1e999, which is read as infinity


class JsonEnd:
    """Finds where a JSON object or array ends that arrives in pieces.

    Brackets are counted outside strings, which is enough for what is JSON; what is not is found out
    when it is read.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "scanned")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.scanned = 0
        """Characters looked at so far."""

    def find(self, text: str, start: int) -> int | None:
        """The index after the value that starts at ``start``; None while it has not ended.

        ``text`` may only have grown since the last call.
        """
        for index in range(start + self.scanned, len(text)):
            char = text[index]
            self.scanned += 1
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None
