"""What each token id spells, in bytes: the table under every decode in this package.

Two spellings exist. *Byte-level* vocabularies (GPT-2 and its heirs) write each byte as one
printable character. *SentencePiece* vocabularies write a space as U+2581 and, when a character is
not in the vocabulary, one token ``<0xNN>`` per byte. Both come down to a byte string per token,
and text is the UTF-8 decoding of their concatenation. The one exception is the space that a
SentencePiece encoder puts before the text: ``DecodeStyle.strips_leading_space`` says that a
decoder must take it away again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steppe.errors import InvalidRequestError, TokenizerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import tokenizers

__all__ = ["BYTE_TO_CHAR", "CHAR_TO_BYTE", "DecodeStyle", "PieceTable", "decode_style"]

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[int, str]:
    """The byte-level spelling: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet)
    alphabet.update({byte: chr(0x100 + index) for index, byte in enumerate(others)})
    return alphabet


BYTE_TO_CHAR: dict[int, str] = _byte_alphabet()
CHAR_TO_BYTE: dict[str, int] = {char: byte for byte, char in BYTE_TO_CHAR.items()}


@dataclass(frozen=True, slots=True)
class DecodeStyle:
    """How token strings become bytes.

    ``space_mark`` is the character that spells a space (None in byte-level vocabularies),
    ``byte_fallback`` says that ``<0xNN>`` spells a byte, and ``strips_leading_space`` that one
    space at the very start of a text belongs to the encoder and not to the text.
    """

    byte_level: bool
    space_mark: str | None = None
    byte_fallback: bool = False
    strips_leading_space: bool = False


def decode_style(core: tokenizers.Tokenizer) -> DecodeStyle:
    """Read the decode style off a tokenizer's decoder.

    Raises ``TokenizerError`` for a missing decoder and for steps that are not a map from tokens to
    bytes (WordPiece, CTC, and the like), because their text cannot be streamed exactly.
    """
    if core.decoder is None:
        raise TokenizerError("the tokenizer has no decoder, so the text of its tokens is undefined")
    steps = list(_flatten(json.loads(core.decoder.__getstate__())))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return DecodeStyle(byte_level=True)
    space_mark: str | None = None
    strips = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": mark}, "content": " "} if len(mark) == 1:
                space_mark = mark
            case {"type": "Metaspace", "replacement": mark}:
                space_mark = mark
                strips = strips or step.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strips = True
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise TokenizerError(
                    f"the tokenizer's decoder has a step this version does not run: {step!r}"
                )
    return DecodeStyle(
        byte_level=False,
        space_mark=space_mark,
        byte_fallback="ByteFallback" in kinds,
        strips_leading_space=strips,
    )


def _flatten(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _flatten(step)
    else:
        yield decoder


class PieceTable(dict[int, bytes]):
    """id -> bytes, filled on first use, so that a lookup of a known id is one dict access.

    ``hidden`` ids spell nothing (the special tokens of a decode that skips them), nor do ids
    without a token. Reading from any number of threads is safe: a race computes the same value
    twice.
    """

    __slots__ = ("_added", "_core", "_hidden", "_size", "_style")

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        style: DecodeStyle,
        *,
        added: frozenset[int],
        hidden: frozenset[int],
        size: int,
    ) -> None:
        super().__init__()
        self._core = core
        self._style = style
        self._added = added
        self._hidden = hidden
        self._size = size

    def __missing__(self, token_id: int) -> bytes:
        if token_id < 0:
            raise InvalidRequestError("token_ids", f"{token_id} is no token id")
        text = self._core.id_to_token(token_id) if token_id < self._size else None
        if text is None:
            return b""
        piece = b"" if token_id in self._hidden else self._spell(token_id, text)
        self[token_id] = piece
        return piece

    def _spell(self, token_id: int, text: str) -> bytes:
        style = self._style
        if style.byte_level:
            if token_id in self._added:
                return text.encode()  # added tokens are written as they are, not byte by byte
            try:
                return bytes([CHAR_TO_BYTE[char] for char in text])
            except KeyError:
                return text.encode()
        if style.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        if style.space_mark is not None:
            text = text.replace(style.space_mark, " ")
        return text.encode()
