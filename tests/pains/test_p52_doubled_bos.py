"""P52: a template wrote BOS, the tokenizer added another, and answers got worse."""

from __future__ import annotations

import pytest

from steppe.text.chat_template import ChatTemplate, encode_chat
from tests.text.conftest import byte_level_tokenizer

MESSAGES = [{"role": "user", "content": "hi <s> there"}]
WRITES_BOS = "{{ bos_token }}{{ messages[0].content }}"
WRITES_NONE = "{{ messages[0].content }}"
WRITES_IT_LATER = "<|im_start|>{{ messages[0].content }}{{ bos_token }}"


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(
    ("source", "count"), [(WRITES_BOS, 1), (WRITES_NONE, 0), (WRITES_IT_LATER, 1)]
)
def test_in_a_chat_the_template_alone_decides(source: str, count: int, adds_bos: bool) -> None:
    tokenizer = byte_level_tokenizer(adds_bos=adds_bos)
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    ids = encode_chat(tokenizer, template, MESSAGES)
    assert ids.count(tokenizer.bos_id or 0) == count


@pytest.mark.parametrize("adds_bos", [True, False])
def test_raw_text_gets_what_the_tokenizer_adds(adds_bos: bool) -> None:
    tokenizer = byte_level_tokenizer(adds_bos=adds_bos)
    for text in ("hi", "<s>hi"):
        assert tokenizer.encode(text).count(tokenizer.bos_id or 0) == int(adds_bos)


def test_a_rendered_prompt_sent_as_raw_text_keeps_one() -> None:
    tokenizer = byte_level_tokenizer(adds_bos=True)
    assert tokenizer.encode("<s>hi", parse_special=True).count(tokenizer.bos_id or 0) == 1
