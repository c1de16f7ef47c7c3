"""P54: the tokenizer of a GGUF file gave other ids than the model's own tokenizer.json.

The same small models in both formats, on the texts that broke. (SmolLM2 and Gemma 3 are compared on
a large corpus in ``tests/text/test_gguf_tokenizer.py``.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from steppe.errors import TokenizerError
from steppe.text.gguf_tokenizer import from_gguf_metadata
from steppe.text.hf_tokenizer import from_directory
from tests.text.conftest import byte_level_core
from tests.text.corpus import STRESS
from tests.text.test_gguf_tokenizer import byte_level_metadata

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = (
    "Hello world! Café déjà vu — 123 😊",
    "<think>\nhm\n</think>",
    "1234567890 12 3",
    "   leading",
    *STRESS,
)


def test_same_ids_in_both_formats(tmp_path: Path) -> None:
    byte_level_core().save(str(tmp_path / "tokenizer.json"))
    original, converted = from_directory(tmp_path), from_gguf_metadata(byte_level_metadata())
    for text in TEXTS:
        for parsed in (True, False):
            ids = original.encode(text, parse_special=parsed)
            assert converted.encode(text, parse_special=parsed) == ids


def test_a_user_defined_token_is_not_split() -> None:
    tokenizer = from_gguf_metadata(byte_level_metadata())
    assert tokenizer.encode("<think>") == [tokenizer.token_to_id("<think>")]


def test_an_unknown_pre_tokenizer_is_refused_not_guessed() -> None:
    with pytest.raises(TokenizerError, match=r"'my-new-bpe'.*guess.*Known"):
        from_gguf_metadata(byte_level_metadata("my-new-bpe"))


def test_missing_merges_are_refused() -> None:
    with pytest.raises(TokenizerError, match="merges"):
        from_gguf_metadata(byte_level_metadata(merges=None))
