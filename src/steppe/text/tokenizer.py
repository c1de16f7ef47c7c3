"""The tokenizer every part of Steppe uses, whatever file it came from."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tokenizers import AddedToken

from steppe.errors import InvalidRequestError, TokenizerError
from steppe.text.pieces import DecodeStyle, PieceTable, decode_style
from steppe.text.special_tokens import SpecialSplitter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import tokenizers

__all__ = ["Tokenizer", "TokenizerSource"]


class TokenizerSource(Protocol):
    """What a tokenizer needs of a checkpoint (``formats.Checkpoint`` has it)."""

    @property
    def kind(self) -> Literal["gguf", "hf"]: ...

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def identity(self) -> str: ...


class Tokenizer:
    """Text to token ids and back. Every method is safe from any thread.

    Control tokens (``<|im_end|>`` and their kind) are never read out of a text unless
    ``parse_special`` says so: a user who types one gets its letters, not its power. Added tokens
    that are not special (``<think>`` in some models) are honoured always, as their models expect.

    ``core`` is a ``tokenizers.Tokenizer`` that this object owns from now on. ``vocab_size`` is one
    more than the largest id; ``stop_ids`` are the ids that end a text or a turn.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        core.no_truncation()
        core.no_padding()
        # From here on the core reads no control token from a text: SpecialSplitter does, when
        # asked. A flag switched per call would race between threads.
        core.encode_special_tokens = True
        added = core.get_added_tokens_decoder()
        size = _vocab_size(core)
        self._core = core
        self._style = decode_style(core)
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = added
        self._splitter: SpecialSplitter | None = None
        self.vocab_size = size
        self._all_pieces = PieceTable(
            core, self._style, added=frozenset(added), hidden=frozenset(), size=size
        )
        self._visible_pieces = PieceTable(
            core, self._style, added=frozenset(added), hidden=self._special_ids, size=size
        )
        for name, token_id in (("bos", bos_id), ("eos", eos_id)):
            if token_id is not None and not 0 <= token_id < size:
                raise TokenizerError(
                    f"the {name} token id {token_id} is outside the vocabulary of {size} tokens"
                )
        self.bos_id = bos_id
        self.eos_id = eos_id
        ends = set(stop_ids) if eos_id is None else {eos_id, *stop_ids}
        self.stop_ids = frozenset(i for i in ends if 0 <= i < size)
        self._prefix, self._suffix = self._affixes()
        self._marker = self._install_marker()

    @classmethod
    def from_checkpoint(
        cls, checkpoint: TokenizerSource, *, cache_dir: Path | None = None
    ) -> Tokenizer:
        """The tokenizer of a checkpoint; ``TokenizerError`` where there is none we can trust.

        ``cache_dir`` keeps the converted form of a GGUF vocabulary for the next start.
        """
        if checkpoint.kind == "gguf":
            from steppe.text.gguf_tokenizer import from_gguf_metadata

            return from_gguf_metadata(
                checkpoint.config, cache_dir=cache_dir, identity=checkpoint.identity
            )
        from steppe.text.hf_tokenizer import from_directory

        return from_directory(checkpoint.path)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """The ids of ``text``, with the model's own BOS/EOS unless ``add_special_tokens`` is off.

        ``parse_special``: control tokens spelled in the text become those tokens, and a BOS that
        the text itself starts with is not doubled.
        """
        if parse_special:
            ids = self.encode_parts(self.splitter.split(text))
        else:
            ids = self._encode_plain(text)
        if not add_special_tokens:
            return ids
        if parse_special and self._prefix and ids[: len(self._prefix)] == self._prefix:
            return [*ids, *self._suffix]
        return [*self._prefix, *ids, *self._suffix]

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        parse_special: bool = False,
    ) -> list[list[int]]:
        """``encode`` of each text, in order, in the calling thread."""
        return [
            self.encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)
            for text in texts
        ]

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        """The ids of a text already cut into ordinary stretches and control token ids.

        A stretch is tokenised as the part of one text that it is: the space that SentencePiece puts
        before a text is put only before a stretch that nothing precedes.
        """
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            elif ids and self._marker is not None:
                ids.extend(self._encode_plain(self._marker + part)[1:])
            else:
                ids.extend(self._encode_plain(part))
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Bytes that are not UTF-8 become U+FFFD, one per maximal subpart.

        One leading space is dropped where the encoder puts one (see ``strips_leading_space``). No
        other clean-up is done: nothing that a stream of pieces could not reproduce. An unknown id
        is an ``InvalidRequestError`` (``token_ids``).
        """
        pieces = self.pieces(skip_special_tokens=skip_special_tokens)
        data = b"".join([pieces[self._checked(i)] for i in ids])
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def pieces(self, *, skip_special_tokens: bool) -> PieceTable:
        """id -> bytes; special tokens spell nothing if they are skipped, nor do ids past the end.

        A model's last weight rows are often padding without a token; one that is sampled all the
        same must not fail its request.
        """
        return self._visible_pieces if skip_special_tokens else self._all_pieces

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token spells; ``InvalidRequestError`` (``token_ids``) for an unknown id."""
        return self._all_pieces[self._checked(token_id)]

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text, with U+FFFD for what is no character by itself."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token, which a decode may skip and a text may not create."""
        return token_id in self._special_ids

    @property
    def adds_bos(self) -> bool:
        """Whether ``encode`` puts BOS first."""
        return self.bos_id is not None and self.bos_id in self._prefix

    @property
    def adds_eos(self) -> bool:
        """Whether ``encode`` puts EOS last."""
        return self.eos_id is not None and self.eos_id in self._suffix

    @property
    def special_ids(self) -> frozenset[int]:
        """Every control token id."""
        return self._special_ids

    @property
    def strips_leading_space(self) -> bool:
        """Whether one space at the start of a decoded text is the encoder's, and is dropped."""
        return self._style.strips_leading_space

    @property
    def style(self) -> DecodeStyle:
        """How token strings spell bytes."""
        return self._style

    @property
    def splitter(self) -> SpecialSplitter:
        """Finds control tokens in a text. Built on first use; a race builds it twice."""
        if self._splitter is None:
            self._splitter = SpecialSplitter(self._added)
        return self._splitter

    def token_to_id(self, text: str) -> int | None:
        """The id whose vocabulary entry is exactly ``text`` (control tokens included), if any."""
        token_id = self._core.token_to_id(text)
        return token_id if token_id is not None and token_id < self.vocab_size else None

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(
                "token_ids",
                f"id {token_id} is outside the vocabulary of {self.vocab_size} tokens",
            )
        return token_id

    def _encode_plain(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError("prompt", f"not encodable text: {error}") from error
        return ids

    def _affixes(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor puts before and after a text."""
        probe = "a"
        plain = self._core.encode(probe, add_special_tokens=False).ids
        full = self._core.encode(probe, add_special_tokens=True).ids
        for at in range(len(full) - len(plain) + 1):
            if full[at : at + len(plain)] == plain:
                return full[:at], full[at + len(plain) :]
        raise TokenizerError("the tokenizer's post-processor changes the text it frames")

    def _install_marker(self) -> str | None:
        """A private added token that makes a stretch tokenise as a continuation.

        Only a Metaspace step with scheme "first" looks at where a stretch stands in its text. The
        marker is random, so no text can contain it, and its id is never let out.
        """
        if not _prefixes_first_stretch_only(self._core):
            return None
        marker = f"\ue000{secrets.token_hex(16)}\ue001"
        self._core.add_tokens([AddedToken(marker, normalized=False, special=False)])
        return marker


def _vocab_size(core: tokenizers.Tokenizer) -> int:
    count = core.get_vocab_size(with_added_tokens=True)
    if count and core.id_to_token(count - 1) is not None and core.id_to_token(count) is None:
        return int(count)
    return max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _prefixes_first_stretch_only(core: tokenizers.Tokenizer) -> bool:
    if core.pre_tokenizer is None:
        return False
    pending = [json.loads(core.pre_tokenizer.__getstate__())]
    while pending:
        step = pending.pop()
        if step["type"] == "Metaspace" and step.get("prepend_scheme") == "first":
            return True
        pending.extend(step.get("pretokenizers", ()))
    return False
