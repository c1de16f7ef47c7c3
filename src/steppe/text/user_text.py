"""Keeping what a user typed apart from what a template wrote.

A template mixes both into one text, and only then is it cut into control tokens and words. So
before rendering, each control token spelled inside a user's string gets one character replaced by
a stand-in, a private-use character that occurs nowhere else in this conversation; after the
control tokens have been found, the stand-ins are turned back. The replaced character is not a
blank, so ``trim`` and its like work as before, and lengths do not change.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from steppe.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from steppe.text.messages import JSONValue
    from steppe.text.special_tokens import SpecialSplitter

__all__ = ["UserTextGuard"]


class UserTextGuard:
    """Protects the strings of one rendering. Used once, by one thread."""

    def __init__(self, splitter: SpecialSplitter) -> None:
        self._splitter = splitter
        self._stand_ins: dict[str, str] = {}
        self._free: Iterator[str] = iter(())

    def protect(self, values: dict[str, JSONValue]) -> dict[str, JSONValue]:
        """A copy of ``values`` in which no string, key or value, spells a control token.

        The end of a string that a following text could complete to one is protected as well.
        """
        taken = set(chain.from_iterable(self._splitter.texts))
        for text in _strings(values):
            taken.update(text)
        self._free = (char for char in _private_use() if char not in taken)
        return {key: self._walk(value) for key, value in values.items()}

    def reveal(self, text: str) -> str:
        """``text`` with every stand-in turned back into what it stands for."""
        for char, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, char)
        return text

    def _walk(self, value: JSONValue) -> JSONValue:
        match value:
            case str():
                return self._protect_text(value)
            case list():
                return [self._walk(item) for item in value]
            case dict():
                return {self._protect_text(k): self._walk(item) for k, item in value.items()}
            case _:
                return value

    def _protect_text(self, text: str) -> str:
        # Replacing one token's character can leave a shorter token matching in what remains.
        while spans := self._splitter.spans(text):
            text = self._replace(text, [span[:2] for span in spans])
        # Text that follows may complete a token here, also once a template has trimmed this end.
        for end in (len(text), len(text.rstrip())):
            while (start := self._splitter.open_end(text[:end])) is not None:
                text = self._replace(text, [(start, end)])
        return text

    def _replace(self, text: str, spans: list[tuple[int, int]]) -> str:
        """One character of each span replaced: its first that is no blank, if it has one."""
        at = 0
        pieces: list[str] = []
        for start, end in spans:
            first = next((i for i in range(start, end) if not text[i].isspace()), start)
            pieces += (text[at:first], self._stand_in(text[first]))
            at = first + 1
        return "".join(pieces) + text[at:]

    def _stand_in(self, char: str) -> str:
        if char not in self._stand_ins:
            stand_in = next(self._free, None)
            if stand_in is None:
                raise InvalidRequestError("messages", "use every private-use character there is")
            self._stand_ins[char] = stand_in
        return self._stand_ins[char]


def _strings(value: JSONValue) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _strings(item)
        case dict():
            for key, item in value.items():
                yield key
                yield from _strings(item)


def _private_use() -> Iterator[str]:
    # The supplementary planes first: icon fonts use the one in the basic plane.
    ranges = ((0xF0000, 0xFFFFE), (0x100000, 0x10FFFE), (0xE000, 0xF900))
    return (chr(code) for low, high in ranges for code in range(low, high))
