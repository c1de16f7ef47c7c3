"""Text of a token stream, piece by piece, never cut inside a character.

Law: for any way of cutting a token sequence into pushes, the pushed texts and the final flush,
concatenated, equal the one-shot decoding of the whole sequence.
"""

from __future__ import annotations

from codecs import utf_8_decode
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from steppe.text.tokenizer import Tokenizer

__all__ = ["DetokenizerState", "IncrementalDetokenizer"]


@dataclass(frozen=True, slots=True)
class DetokenizerState:
    """A point in a stream to come back to."""

    held: bytes
    owes_nothing: bool
    strips_space: bool


class IncrementalDetokenizer:
    """Turns pushed token ids into the text they complete. For one thread at a time.

    At most three bytes are held back: the start of a character whose end has not come. Bytes that
    can no longer become a character turn into U+FFFD at once, one per maximal subpart, as in
    Python's own decoder; a character cut off by the end of the stream becomes one U+FFFD in
    ``flush``.

    A SentencePiece encoder puts a space before a text, so a text that starts with the first id
    drops it, as ``Tokenizer.decode`` does. ``prompt_ids_tail``, the last ids of the prompt, makes
    the stream a continuation instead: the space is kept if the tail spells anything, and the
    first bytes may finish a character that the prompt began. Special tokens spell nothing if they
    are skipped.
    """

    __slots__ = ("_held", "_owes_nothing", "_pieces", "_strips_space")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prompt_ids_tail: Sequence[int] = (),
    ) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
        tail = b"".join([self._pieces[i] for i in prompt_ids_tail])
        self._strips_space = tokenizer.strips_leading_space and not tail
        self._held = _unfinished(tail)
        self._owes_nothing = True

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that ``token_ids`` complete. Ids past the tokenizer's last one (padding rows of
        a model) spell nothing."""
        data = b"".join(map(self._pieces.__getitem__, token_ids))
        if not data:
            return ""
        self._owes_nothing = False
        if self._strips_space:
            self._strips_space = False
            data = data.removeprefix(b" ")
        if self._held:
            data = self._held + data
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        """What the end of the stream still owes: U+FFFD for an unfinished character (two for half
        a surrogate, which is none), else nothing.

        An unfinished character of the prompt that no pushed byte touched is not this stream's debt.
        """
        # The decoder also waits behind the first two bytes of a surrogate, which are two errors.
        text = "" if self._owes_nothing else self._held.decode("utf-8", "replace")
        self._held = b""
        self._owes_nothing = True
        return text

    def snapshot(self) -> DetokenizerState:
        """The state, to ``restore`` in this or another detokenizer of the same tokenizer."""
        return DetokenizerState(self._held, self._owes_nothing, self._strips_space)

    def restore(self, state: DetokenizerState) -> None:
        """Continue from ``state``."""
        self._held = state.held
        self._owes_nothing = state.owes_nothing
        self._strips_space = state.strips_space

    def copy(self) -> IncrementalDetokenizer:
        """An independent detokenizer at the same point."""
        twin = object.__new__(IncrementalDetokenizer)
        twin._pieces = self._pieces
        twin.restore(self.snapshot())
        return twin


def _unfinished(data: bytes) -> bytes:
    """The bytes at the end of ``data`` that begin a character and do not finish it."""
    tail = data[-4:]
    # A tail may start inside a character; its stray bytes decode to U+FFFD and are used up.
    return tail[utf_8_decode(tail, "replace", False)[1] :]
