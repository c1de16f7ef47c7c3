"""Our vocabulary as llguidance reads it."""

from __future__ import annotations

import os
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from llguidance import LLExecutor, LLTokenizer

    from steppe.text.tokenizer import Tokenizer

__all__ = ["WORD_BYTES", "GrammarVocabulary", "bit_mask"]

Mask = npt.NDArray[np.uint32]

WORD_BYTES = 4

MOST_THREADS = 8

FEWEST_PRODUCTS = 48
"""Of masks and threads. With fewer, masks are done sooner one after another: each finds in the
caches what the one before has fetched, and nobody has to wake up.
"""

REMEMBERED = 1024
LONGEST_REMEMBERED = 256

LETTERS = "[a-zA-Z0-9 ]{1,20}", "[a-z ]{1,20}"
"""Tokens that a mask has all at once where a form allows such text, beside the library's own sets
(parts of JSON strings): most of what patterns and bounded strings allow.
"""


def bit_mask(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """uint32[ceil(vocab_size / 32)] with the bits of ``token_ids`` set; those past the end are left
    out.
    """
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    ids = np.fromiter(token_ids, np.int64)
    bits[ids[ids < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


class _TokenTable:
    """The attributes that ``LLTokenizer`` reads of a tokenizer written in Python."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_id: int, special_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.eos_token_id = eos_id
        self.special_token_ids = sorted(special_ids)
        # What a grammar forces, such as the names of properties, comes again in every record and
        # every answer, and between two steps of a model a look at it costs 80 us.
        self._remembered = lru_cache(REMEMBERED)(self._encode)

    def __call__(self, text: str) -> list[int]:
        """The ids of a stretch in the middle of a text: what it starts with is not the start."""
        found = self._encode if len(text) > LONGEST_REMEMBERED else self._remembered
        return list(found(text))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_parts([self.eos_token_id, text])[1:])


class GrammarVocabulary:
    """What each token spells, for grammars, and which tokens they may use at all.

    ``vocab_size`` is the model's: rows without a token can never be sampled. The ids in
    ``end_ids`` end answers of this model and are no text to any grammar. The space that a
    SentencePiece decoder takes away from the start of a text is one that a grammar has seen.
    Immutable, any thread; but for ``rows``, which are the actor thread's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        from llguidance import LLTokenizer

        known = [i for i in sorted(end_ids) if i < tokenizer.vocab_size]
        # The library wants an end token of its own. It is taken out of every mask again: where an
        # answer may end is told by the grammar's state, and by which tokens, by the request.
        first_special = min(tokenizer.special_ids, default=0)
        ends = known or [first_special]
        table = _TokenTable(tokenizer, ends[0], {*tokenizer.special_ids, *ends})
        self.vocab_size = vocab_size
        slices = [*LLTokenizer.general_slices(), *LETTERS]
        self.ll: LLTokenizer = LLTokenizer(table, eos_token=ends, slices=slices)  # type: ignore[arg-type]
        text_ids = set(range(tokenizer.vocab_size)).difference(ends)
        self.usable = bit_mask(text_ids, vocab_size)
        """uint32[ceil(vocab_size / 32)]: the tokens that may be part of an answer."""
        self.mask_words = -(-self.ll.vocab_size // 32)
        """How many words the library writes of a mask: the tokenizer's tokens, not the model's."""
        self._threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self.fewest_together = max(2, FEWEST_PRODUCTS // self._threads)
        """How many masks at least are computed side by side rather than one after another."""
        self._rows: list[Mask] = []
        self._address = 0

    def rows(self, count: int) -> tuple[int, list[Mask]]:
        """Room for ``count`` and more masks computed side by side: where its ``mask_words`` words a
        mask begin, and the part of each that is the model's. The same room at every call.
        """
        if count > len(self._rows):
            room = np.zeros((2 * count, self.mask_words), np.uint32)
            self._address = room.ctypes.data
            self._rows = [row[: len(self.usable)] for row in room]
        return self._address, self._rows

    @cached_property
    def executor(self) -> LLExecutor:
        """Threads that compute masks side by side, started when there are first two to compute."""
        from llguidance import LLExecutor

        return LLExecutor(self._threads)
