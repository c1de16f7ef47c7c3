"""Finding control tokens in a text, apart from tokenising it.

A prompt that a template rendered holds control tokens the template meant and, perhaps, the same
strings typed by a user. The tokenizers of this package never read control tokens out of a text by
themselves; this splitter finds them, and the caller decides which ones count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from steppe.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import AddedToken

__all__ = ["SpecialSplitter"]

_ORDINARY = 0


class SpecialSplitter:
    """Cuts a text into ordinary stretches and control token ids. Safe from any thread.

    The matching is done by a second ``tokenizers`` instance that knows the added tokens and
    nothing else, so overlaps, stripping of blanks and word boundaries follow the library's own
    rules (left to right, longest first) exactly.
    """

    __slots__ = ("_first_chars", "_ids", "_longest", "_matcher", "_prefixes", "texts")

    def __init__(self, added: Mapping[int, AddedToken]) -> None:
        matcher = Tokenizer(WordLevel({"": _ORDINARY}, unk_token=""))
        tokens = [token for _, token in sorted(added.items())]
        matcher.add_tokens(tokens)
        ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self._matcher = matcher
        self._ids = {
            matcher_id: ids[token.content]
            for matcher_id, token in matcher.get_added_tokens_decoder().items()
            if token.content in ids
        }
        self.texts = frozenset(ids)
        self._first_chars = frozenset(text[0] for text in ids)
        self._longest = max(map(len, ids), default=0)
        self._prefixes = frozenset(text[:n] for text in ids for n in range(1, len(text)))

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        """``(start, end, token id)`` of each control token, in order, in characters.

        ``InvalidRequestError`` (``prompt``) for what is not valid Unicode.
        """
        if not self._ids:
            return []
        try:
            found = self._matcher.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError("prompt", f"not encodable text: {error}") from error
        return [
            (start, end, self._ids[matcher_id])
            for matcher_id, (start, end) in zip(found.ids, found.offsets, strict=True)
            if matcher_id in self._ids
        ]

    def open_end(self, text: str) -> int | None:
        """Where the longest end of ``text`` starts that more text could make a control token."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first_chars and text[at:] in self._prefixes:
                return at
        return None

    def split(self, text: str) -> list[str | int]:
        """The text as alternating ordinary strings (never empty) and control token ids."""
        parts: list[str | int] = []
        at = 0
        for start, end, token_id in self.spans(text):
            if start > at:
                parts.append(text[at:start])
            parts.append(token_id)
            at = end
        if at < len(text):
            parts.append(text[at:])
        return parts
