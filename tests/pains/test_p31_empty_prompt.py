"""P31: an empty prompt killed the server. It must come out as BOS, or as nothing.

Tokenizer part: what the runtime then does with zero ids is its own test.
"""

from __future__ import annotations

import pytest

from steppe.errors import InvalidRequestError
from steppe.text.chat_template import ChatTemplate, encode_chat
from tests.text.conftest import byte_level_tokenizer


def test_empty_text_is_bos_or_nothing() -> None:
    with_bos, without = byte_level_tokenizer(adds_bos=True), byte_level_tokenizer(adds_bos=False)
    assert with_bos.encode("") == [with_bos.bos_id]
    assert without.encode("") == []
    assert with_bos.encode("", add_special_tokens=False) == []
    assert with_bos.encode_batch(["", "a"])[0] == [with_bos.bos_id]
    for tokenizer in (with_bos, without):
        assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("text", [" ", "\n", "\t \n", "\u00a0", "\u3000"])
def test_blank_text_is_not_empty(text: str) -> None:
    tokenizer = byte_level_tokenizer(adds_bos=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) != []


@pytest.mark.parametrize("messages", [[], [{}], [{"role": "user", "content": None}]])
def test_an_empty_conversation_is_refused(messages: list[dict[str, object]]) -> None:
    tokenizer = byte_level_tokenizer(adds_bos=True)
    with pytest.raises(InvalidRequestError, match="messages"):
        encode_chat(tokenizer, ChatTemplate("{{ messages }}"), messages)


def test_a_conversation_that_renders_to_nothing_is_refused() -> None:
    tokenizer = byte_level_tokenizer(adds_bos=True)
    messages = [{"role": "user", "content": ""}]
    with pytest.raises(InvalidRequestError, match="empty prompt"):
        encode_chat(tokenizer, ChatTemplate("{{ messages[0].content }}"), messages)
