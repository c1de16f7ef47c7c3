"""Finding control tokens in a text, by the library's own matching rules."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from steppe.text.special_tokens import SpecialSplitter


def splitter(*tokens: AddedToken) -> SpecialSplitter:
    return SpecialSplitter({10 + i: token for i, token in enumerate(tokens)})


def special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **flags)


PLAIN = splitter(special("<a>"), special("<ab>"), special("ab>"), AddedToken("<t>", special=False))


@given(text=st.text("<ab>t ", max_size=30))
def test_leftmost_longest(text: str) -> None:
    """A slow statement of the rule for tokens without flags."""
    tokens = {"<a>": 10, "<ab>": 11, "ab>": 12, "<t>": None}
    expected: list[str | int] = []
    plain, at = "", 0
    while at < len(text):
        found = max((t for t in tokens if text.startswith(t, at)), key=len, default=None)
        if found is None or tokens[found] is None:
            step = found or text[at]
            plain += step
            at += len(step)
            continue
        if plain:
            expected.append(plain)
        token_id = tokens[found]
        assert token_id is not None
        expected.append(token_id)
        plain, at = "", at + len(found)
    if plain:
        expected.append(plain)
    assert PLAIN.split(text) == expected


def test_flags_are_honoured() -> None:
    flagged = splitter(special("<m>", lstrip=True, rstrip=True), special("word", single_word=True))
    assert flagged.split("a  <m> \nb") == ["a", 10, "b"]
    assert flagged.split("password word") == ["password ", 11]


@given(text=st.text("<ab>", max_size=12), more=st.text("<ab>", max_size=4))
def test_open_end_is_where_more_text_could_complete_a_token(text: str, more: str) -> None:
    """Without an open end, no token can straddle the join."""
    opening = PLAIN.open_end(text)
    joined = text + more
    straddling = [
        at
        for at in range(len(text))
        for token in PLAIN.texts
        if joined.startswith(token, at) and at + len(token) > len(text)
    ]
    if straddling:
        assert opening is not None
        assert opening <= min(straddling)


def test_no_control_tokens_is_one_stretch() -> None:
    assert splitter(AddedToken("<t>", special=False)).split("a<t>b") == ["a<t>b"]
    assert splitter().split("") == []
