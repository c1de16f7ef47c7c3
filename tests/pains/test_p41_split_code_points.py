"""P41: emoji and CJK arrived as U+FFFD, because a character was cut between two tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.text.detokenizer import IncrementalDetokenizer
from tests.text.conftest import byte_level_tokenizer

if TYPE_CHECKING:
    from steppe.text.tokenizer import Tokenizer

TOKENIZER = byte_level_tokenizer(adds_bos=False)
TEXTS = ("😊", "你好，世界", "👩‍👩‍👧‍👦 family", "🇺🇸 e\u0301 Z̷͓̈", "日本語 😀😀", "Ω≈ç√∫")


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer)
    return [*(stream.push([i]) for i in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_stay_whole(text: str) -> None:
    pieces = streamed(TOKENIZER, TOKENIZER.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 2  # the small vocabulary spells these byte by byte


@given(text=st.text(min_size=1), data=st.data())
def test_cut_off_by_max_tokens(text: str, data: st.DataObject) -> None:
    """Everything whole is delivered, and the broken rest is one U+FFFD."""
    ids = TOKENIZER.encode(text)
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    raw = b"".join(map(TOKENIZER.token_bytes, ids))
    whole = raw.decode("utf-8", "ignore")
    expected = whole if whole.encode() == raw else whole + "\ufffd"
    assert "".join(streamed(TOKENIZER, ids)) == expected == TOKENIZER.decode(ids)
