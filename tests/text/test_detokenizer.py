"""Law: pushes and flush, concatenated, are the one-shot decoding, however the ids are cut up."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steppe.errors import InvalidRequestError
from steppe.text.detokenizer import IncrementalDetokenizer
from tests.text.corpus import any_text

if TYPE_CHECKING:
    from steppe.text.tokenizer import Tokenizer

shared_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = ("byte_level", "sentencepiece_style", "metaspace_first")


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def chunks(ids: list[int], data: st.DataObject) -> list[list[int]]:
    """``ids`` cut at random places, with empty chunks among them."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids) + 2)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@given(data=st.data(), skip=st.booleans())
@shared_fixtures
def test_any_ids_in_any_chunks(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [stream.push(chunk) for chunk in chunks(ids, data)]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=any_text, data=st.data())
@shared_fixtures
def test_valid_text_comes_back_whole(
    byte_level: Tokenizer, sentencepiece_style: Tokenizer, text: str, data: st.DataObject
) -> None:
    spaced = text.replace("▁", " ")
    if "<think>" in text:  # an added token; what follows one is encoded, and decoded, with a space
        spaced = sentencepiece_style.decode(sentencepiece_style.encode(text))
    for tokenizer, expected in ((byte_level, text), (sentencepiece_style, spaced)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = IncrementalDetokenizer(tokenizer)
        pieces = [stream.push([token_id]) for token_id in ids]
        assert "\ufffd" not in "".join(pieces).replace("\ufffd", "", text.count("\ufffd"))
        assert "".join(pieces) + stream.flush() == expected


@given(text=any_text)
@shared_fixtures
def test_no_character_waits_longer_than_it_must(byte_level: Tokenizer, text: str) -> None:
    """After each push, all that is missing is at most three bytes of one unfinished character."""
    stream = IncrementalDetokenizer(byte_level)
    seen, raw = "", b""
    for token_id in byte_level.encode(text):
        seen += stream.push([token_id])
        raw += byte_level.token_bytes(token_id)
        assert raw.startswith(seen.encode())
        assert len(raw) - len(seen.encode()) <= 3


@given(raw=st.binary(max_size=30))
@shared_fixtures
def test_invalid_bytes_decode_as_python_does(byte_level: Tokenizer, raw: bytes) -> None:
    ids = [byte_level.token_to_id(chr_) for chr_ in _spelled(raw)]
    assert None not in ids
    stream = IncrementalDetokenizer(byte_level)
    text = "".join(stream.push([token_id]) for token_id in ids if token_id is not None)
    assert text + stream.flush() == raw.decode("utf-8", "replace")


def _spelled(raw: bytes) -> list[str]:
    """Each byte in the byte-level alphabet, computed apart from the code under test."""
    others = [b for b in range(256) if not re.match("[!-~¡-¬®-ÿ]", chr(b))]
    return [chr(256 + others.index(b)) if b in others else chr(b) for b in raw]


def test_a_cut_character_becomes_one_replacement(byte_level: Tokenizer) -> None:
    ids = [byte_level.token_to_id(char) for char in _spelled("😊".encode()[:3])]
    stream = IncrementalDetokenizer(byte_level)
    assert [stream.push([i]) for i in ids if i is not None] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_half_a_surrogate_at_the_end_is_two_errors(byte_level: Tokenizer) -> None:
    ids = [i for i in map(byte_level.token_to_id, _spelled(b"\xed\xa0")) if i is not None]
    stream = IncrementalDetokenizer(byte_level)
    assert stream.push(ids) + stream.flush() == byte_level.decode(ids) == "\ufffd\ufffd"


def test_the_encoders_space_is_dropped_at_the_start_only(sentencepiece_style: Tokenizer) -> None:
    ids = sentencepiece_style.encode("hello world", add_special_tokens=False)
    stream = IncrementalDetokenizer(sentencepiece_style)
    assert "".join(stream.push([i]) for i in ids) == "hello world"
    prompt = sentencepiece_style.encode("say")
    continued = IncrementalDetokenizer(sentencepiece_style, prompt_ids_tail=prompt[-4:])
    assert "".join(continued.push([i]) for i in ids) == " hello world"
    assert sentencepiece_style.bos_id is not None
    after_bos = IncrementalDetokenizer(
        sentencepiece_style, prompt_ids_tail=[sentencepiece_style.bos_id]
    )
    assert after_bos.push(ids) == "hello world"


@given(text=st.text(min_size=1, max_size=20), cut=st.integers(0, 60))
@shared_fixtures
def test_a_character_begun_by_the_prompt_is_finished(
    byte_level: Tokenizer, text: str, cut: int
) -> None:
    """A continuation yields all that the prompt did not show, even from inside a character."""
    ids = byte_level.encode(text)
    cut = min(cut, len(ids))
    stream = IncrementalDetokenizer(byte_level, prompt_ids_tail=ids[:cut])
    shown = b"".join(byte_level.token_bytes(i) for i in ids[:cut]).decode("utf-8", "ignore")
    assert shown + stream.push(ids[cut:]) + stream.flush() == text


def test_the_prompts_own_cut_character_is_not_the_streams_debt(byte_level: Tokenizer) -> None:
    begun = byte_level.token_to_id(_spelled("é".encode())[0])
    assert begun is not None
    assert IncrementalDetokenizer(byte_level, prompt_ids_tail=[begun]).flush() == ""


def test_skipped_control_tokens_spell_nothing(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_end|>b", parse_special=True)
    assert IncrementalDetokenizer(byte_level).push(ids) == "ab"
    shown = IncrementalDetokenizer(byte_level, skip_special_tokens=False)
    assert shown.push(ids) == "a<|im_end|>b"


def test_padding_ids_spell_nothing_and_negative_ones_are_refused(byte_level: Tokenizer) -> None:
    stream = IncrementalDetokenizer(byte_level)
    assert stream.push([byte_level.vocab_size, byte_level.vocab_size + 1000]) == ""
    with pytest.raises(InvalidRequestError) as caught:
        stream.push([-1])
    assert caught.value.field == "token_ids"


@given(data=st.data())
@shared_fixtures
def test_snapshot_restore_and_copy(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    stream = IncrementalDetokenizer(tokenizer)
    first = stream.push(ids[:cut])
    state, twin = stream.snapshot(), stream.copy()
    rest = stream.push(ids[cut:]) + stream.flush()
    assert twin.push(ids[cut:]) + twin.flush() == rest
    resumed = IncrementalDetokenizer(tokenizer)
    resumed.restore(state)
    assert resumed.push(ids[cut:]) + resumed.flush() == rest
    assert first + rest == tokenizer.decode(ids)
