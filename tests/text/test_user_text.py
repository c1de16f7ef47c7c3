"""The stand-ins that keep users' strings from spelling control tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from steppe.errors import InvalidRequestError
from steppe.text.special_tokens import SpecialSplitter
from steppe.text.user_text import UserTextGuard, _private_use

SPLITTER = SpecialSplitter(
    {
        i: AddedToken(text, special=True, normalized=False)
        for i, text in enumerate(["<a>", "<ab>", "ab>", "b", "\U000f0000", " <s>"], start=1)
    }
)
texts = st.text("<ab> s>\U000f0000\U000f0001\ue000", max_size=20)


@given(parts=st.lists(texts, max_size=4), key=texts)
def test_protected_text_spells_no_token_alone_or_joined(parts: list[str], key: str) -> None:
    guard = UserTextGuard(SPLITTER)
    protected = guard.protect({"x": {key: list(parts)}})
    (inner,) = [protected["x"]]
    assert isinstance(inner, dict)
    ((new_key, new_parts),) = inner.items()
    assert isinstance(new_parts, list)
    for joined in (
        "".join(map(str, new_parts)),
        "".join(str(p).strip() for p in new_parts),
        new_key,
    ):
        assert SPLITTER.spans(joined) == []
    assert [guard.reveal(str(part)) for part in new_parts] == parts
    assert guard.reveal(new_key) == key
    assert [len(str(part)) for part in new_parts] == [len(part) for part in parts]
    for new, old in zip(new_parts, parts, strict=True):
        if not old.endswith(" "):  # " <s>" starts with a blank, which then has to be replaced
            assert guard.reveal(str(new).strip()) == old.strip()


def test_harmless_text_is_untouched() -> None:
    values = {"messages": [{"content": "plain words", "n": 1, "f": None}]}
    assert UserTextGuard(SPLITTER).protect(values) == values


def test_a_text_with_every_private_character_is_refused() -> None:
    everything = "".join(_private_use())
    with pytest.raises(InvalidRequestError, match="private-use"):
        UserTextGuard(SPLITTER).protect({"x": everything + "<a>"})
    assert UserTextGuard(SPLITTER).protect({"x": everything[1:]}) == {"x": everything[1:]}
