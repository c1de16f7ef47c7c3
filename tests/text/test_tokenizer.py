"""The tokenizer's own promises, on small vocabularies of each kind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers

from steppe.errors import InvalidRequestError, TokenizerError
from steppe.text.tokenizer import Tokenizer
from tests.text.conftest import SENTENCES, byte_level_core
from tests.text.corpus import any_text

if TYPE_CHECKING:
    import numpy as np

shared_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = ("byte_level", "byte_level_bos", "sentencepiece_style", "metaspace_first")


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def reference_core(tokenizer: Tokenizer, *, split_special: bool) -> Core:
    """The library's tokenizer with the same vocabulary, set one way for good."""
    core = Core.from_str(tokenizer._core.to_str())
    core.encode_special_tokens = split_special
    return core


@given(text=any_text)
@shared_fixtures
def test_encode_is_the_librarys_in_both_modes(tokenizer: Tokenizer, text: str) -> None:
    for parsed in (False, True):
        core = reference_core(tokenizer, split_special=not parsed)
        for added in (False, True):
            ids = core.encode(text, add_special_tokens=added).ids
            if parsed and added and ids[:2] == [tokenizer.bos_id] * 2:
                continue  # we do not double a BOS that the text starts with
            mine = tokenizer.encode(text, add_special_tokens=added, parse_special=parsed)
            assert mine == ids


@given(text=any_text)
@shared_fixtures
def test_text_alone_makes_no_control_token(tokenizer: Tokenizer, text: str) -> None:
    text = f"{text}<s></s><|im_end|>{text}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    # A character outside a vocabulary without byte fallback is <unk>, which is a special token.
    unknown = tokenizer.token_to_id("<unk>")
    assert [i for i in ids if tokenizer.is_special(i) and i != unknown] == []


def test_parsed_bos_is_not_doubled(byte_level_bos: Tokenizer) -> None:
    bos = byte_level_bos.bos_id
    assert byte_level_bos.encode("<s>hi", parse_special=True).count(bos) == 1
    assert byte_level_bos.encode("hi", parse_special=True)[0] == bos
    assert byte_level_bos.adds_bos


def test_the_space_of_a_text_is_not_put_after_a_control_token(metaspace_first: Tokenizer) -> None:
    parsed = metaspace_first.encode("<|im_end|>hello", add_special_tokens=False, parse_special=True)
    assert metaspace_first.decode(parsed[1:2], skip_special_tokens=False)[:1] != " "
    plain = metaspace_first.encode("hello", add_special_tokens=False)
    assert parsed[1:] != plain
    assert metaspace_first.token_bytes(plain[0]).startswith(b" ")
    assert not metaspace_first.token_bytes(parsed[1]).startswith(b" ")


def test_batch_is_one_by_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(SENTENCES) == [tokenizer.encode(text) for text in SENTENCES]


def test_pieces_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    for text in SENTENCES:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.token_to_id("<unk>") in ids:
            continue
        if (
            text.startswith(" ")
            and tokenizer.style.space_mark
            and not tokenizer.style.byte_fallback
        ):
            continue  # Metaspace puts no space before a space, and takes one away all the same
        raw = b"".join(map(tokenizer.token_bytes, ids))
        assert raw.decode() == (" " if tokenizer.strips_leading_space else "") + text
        assert tokenizer.decode(ids) == text


def test_byte_fallback_tokens_are_single_bytes(sentencepiece_style: Tokenizer) -> None:
    token_id = sentencepiece_style.token_to_id("<0xE2>")
    assert token_id is not None
    assert sentencepiece_style.token_bytes(token_id) == b"\xe2"
    assert sentencepiece_style.token_text(token_id) == "\ufffd"


@pytest.mark.parametrize("token_id", [-1, 10**9])
def test_unknown_ids_are_refused(tokenizer: Tokenizer, token_id: int) -> None:
    for call in (tokenizer.token_bytes, tokenizer.token_text, lambda i: tokenizer.decode([i])):
        with pytest.raises(InvalidRequestError) as caught:
            call(token_id)
        assert caught.value.field == "token_ids"
    with pytest.raises(InvalidRequestError):
        tokenizer.token_bytes(tokenizer.vocab_size)


def test_text_that_is_no_text_is_refused(tokenizer: Tokenizer) -> None:
    for parsed in (True, False):
        with pytest.raises(InvalidRequestError) as caught:
            tokenizer.encode("a\ud800b", parse_special=parsed)
        assert caught.value.field == "prompt"


def test_threads_agree(tokenizer: Tokenizer, rng: np.random.Generator) -> None:
    texts = ["".join(rng.permutation(list(SENTENCES))) + "<|im_end|>" for _ in range(40)]
    jobs = [(text, parsed) for text in texts for parsed in (True, False)]

    def work(job: tuple[str, bool]) -> list[int]:
        return tokenizer.encode(job[0], parse_special=job[1])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, jobs)) == [work(job) for job in jobs]


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    core = byte_level_core()
    core.enable_truncation(2)
    core.enable_padding(length=50)
    tokenizer = Tokenizer(core)
    assert tokenizer.decode(tokenizer.encode(SENTENCES[0])) == SENTENCES[0]


def test_decoders_that_cannot_be_streamed_are_refused() -> None:
    core = Core(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(TokenizerError, match="no decoder"):
        Tokenizer(core)
    core.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer(core)


def test_a_vocabulary_with_holes_ends_after_its_last_id() -> None:
    core = Core(models.BPE({"a": 0, "b": 7}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(core)
    assert tokenizer.vocab_size == 8
    assert tokenizer.encode("ab") == [0, 7]
    assert tokenizer.decode([0, 7]) == "ab"


def test_an_added_token_spells_itself() -> None:
    """Even in characters that the byte-level alphabet uses for other bytes."""
    core = byte_level_core()
    core.add_tokens(["café"])
    tokenizer = Tokenizer(core)
    ids = tokenizer.encode("x café y")
    assert tokenizer.token_to_id("café") in ids
    assert tokenizer.decode(ids) == "x café y"


def test_an_eos_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(TokenizerError, match="eos token id 99999"):
        Tokenizer(byte_level_core(), eos_id=99999)
