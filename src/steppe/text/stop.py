"""Stop strings over streamed text: emit what is safe, hold back only what a stop may claim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StopMatcher", "StopRules"]


@dataclass(frozen=True, slots=True)
class StopRules:
    """Stop strings, prepared once: distinct, their proper prefixes, and where a prefix can end."""

    stops: tuple[str, ...]
    prefixes: frozenset[str]
    prefix_ends: frozenset[str]
    longest: int

    @classmethod
    def of(cls, stops: Sequence[str]) -> StopRules:
        """``InvalidRequestError`` (``stop``) for an empty stop string: it would match at once."""
        distinct = tuple(dict.fromkeys(stops))
        if any(not stop for stop in distinct):
            raise InvalidRequestError("stop", "a stop string is empty")
        prefixes = frozenset(stop[:n] for stop in distinct for n in range(1, len(stop)))
        return cls(
            stops=distinct,
            prefixes=prefixes,
            prefix_ends=frozenset(prefix[-1] for prefix in prefixes),
            longest=max(map(len, distinct), default=0),
        )


class StopMatcher:
    """Cuts a stream of text at the first stop string. For one thread at a time.

    The match is the occurrence that starts earliest in the whole text; of several that start at
    the same place it is the shortest, because it is complete first and the text before it is the
    same. So the result does not depend on how the text was cut into pushes: what is emitted, all
    together, is the text before that occurrence (through its end with ``include_stop``), or all
    of it.

    Held back is the longest end of the text that some stop could still complete, and nothing
    more. A complete stop is not reported while an earlier, longer one may still come true;
    ``flush`` decides.
    """

    __slots__ = ("_held", "_include_stop", "_rules", "matched")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._rules = StopRules.of(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text, once one has."""

    def push(self, text: str) -> tuple[str, str | None]:
        """``(text safe to emit, the matched stop or None)``. After a match: ``("", that stop)``."""
        if self.matched is not None or not text:
            return "", self.matched
        if not self._rules.stops:
            return text, None
        text = self._held + text
        pending = self._earliest_pending(text)
        start, stop = self._earliest_match(text)
        if stop is not None and start <= pending:
            return self._end_at(text, start, stop)
        self._held = text[pending:]
        return text[:pending], None

    def flush(self) -> tuple[str, str | None]:
        """``(text held back, the matched stop or None)`` at the end of the stream."""
        if self.matched is not None:
            return "", self.matched
        text, self._held = self._held, ""
        start, stop = self._earliest_match(text)
        return (text, None) if stop is None else self._end_at(text, start, stop)

    @property
    def held(self) -> str:
        """The text held back now."""
        return self._held

    def copy(self) -> StopMatcher:
        """An independent matcher at the same point."""
        twin = object.__new__(StopMatcher)
        twin._rules = self._rules
        twin._include_stop = self._include_stop
        twin._held = self._held
        twin.matched = self.matched
        return twin

    def _end_at(self, text: str, start: int, stop: str) -> tuple[str, str]:
        self.matched = stop
        self._held = ""
        return text[: start + len(stop) if self._include_stop else start], stop

    def _earliest_match(self, text: str) -> tuple[int, str | None]:
        best, found = len(text), None
        for stop in self._rules.stops:
            at = text.find(stop)
            if at >= 0 and (at < best or (at == best and found and len(stop) < len(found))):
                best, found = at, stop
        return best, found

    def _earliest_pending(self, text: str) -> int:
        """Where the longest end of ``text`` starts that is a proper prefix of a stop."""
        rules = self._rules
        size = len(text)
        if text[-1] in rules.prefix_ends:
            for at in range(max(0, size - rules.longest + 1), size):
                if text[at:] in rules.prefixes:
                    return at
        return size
