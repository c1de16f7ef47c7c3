"""Tokenizers from GGUF metadata, against transformers' conversion, SentencePiece and the format."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steppe.errors import TokenizerError
from steppe.text.gguf_tokenizer import TokenType, from_gguf_metadata
from tests.text.conftest import SENTENCES, byte_level_core, spm_metadata
from tests.text.corpus import STRESS, any_text

if TYPE_CHECKING:
    import sentencepiece

    from steppe.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(900)  # the reference alone takes seconds to load
shared_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def has_number(text: str) -> bool:
    """Whether a character is of Unicode category N, which is what SmolLM's rule cuts off."""
    return any(unicodedata.category(char).startswith("N") for char in text)


def same_ids(tokenizer: Tokenizer, reference: Any, text: str) -> bool:
    """Control tokens in the text read as control tokens (the reference's default), and as text.

    BOS is compared in the second case: in the first, we do not double one that the text brings.
    """
    parsed = tokenizer.encode(text, parse_special=True, add_special_tokens=False)
    plain = tokenizer.encode(text)
    return (
        parsed == reference(text, add_special_tokens=False).input_ids
        and plain == reference(text, split_special_tokens=True).input_ids
    )


class TestSmolLM2:
    """Reference: transformers, whose conversion does not know the pre-tokenizer ``smollm``.

    It falls back to GPT-2's cut, which keeps runs of digits together and ties a space to a number.
    SmolLM2's own tokenizer.json puts ``Digits(individual_digits=True)`` in front of that cut, as
    llama.cpp does for this name. So a text with numbers may differ, and there we are right: given
    the digit step (``smollm2_corrected``), the reference agrees on every text.
    """

    @pytest.mark.parametrize("text", STRESS, ids=range(len(STRESS)))
    def test_stress_corpus(
        self, smollm2: Tokenizer, smollm2_reference: Any, smollm2_corrected: Any, text: str
    ) -> None:
        assert same_ids(smollm2, smollm2_corrected, text)
        if not has_number(text):
            assert same_ids(smollm2, smollm2_reference, text)

    @given(text=any_text)
    @shared_fixtures
    def test_any_text(
        self, smollm2: Tokenizer, smollm2_reference: Any, smollm2_corrected: Any, text: str
    ) -> None:
        assert same_ids(smollm2, smollm2_corrected, text)
        if not has_number(text):
            assert same_ids(smollm2, smollm2_reference, text)

    def test_the_difference_is_real(self, smollm2: Tokenizer, smollm2_reference: Any) -> None:
        text = "a  1"
        ours, theirs = smollm2.encode(text), smollm2_reference(text).input_ids
        assert ours != theirs
        assert [smollm2.token_text(i) for i in ours] == ["a", "  ", "1"]
        assert [smollm2.token_text(i) for i in theirs] == ["a", " ", " ", "1"]

    @given(ids=st.lists(st.integers(0, 49151), max_size=40))
    @shared_fixtures
    def test_decode_is_the_references(
        self, smollm2: Tokenizer, smollm2_reference: Any, ids: list[int]
    ) -> None:
        for skip in (True, False):
            assert smollm2.decode(ids, skip_special_tokens=skip) == smollm2_reference.decode(
                ids, skip_special_tokens=skip
            )

    def test_what_the_file_says(self, smollm2: Tokenizer) -> None:
        assert smollm2.vocab_size == 49152
        assert (smollm2.bos_id, smollm2.eos_id) == (1, 2)
        assert not smollm2.adds_bos
        assert smollm2.stop_ids == {0, 2}  # <|im_end|>, and <|endoftext|> by its name
        assert smollm2.is_special(2)
        assert not smollm2.is_special(100)


@pytest.mark.slow
class TestGemma3:
    """Reference: transformers. There is no difference to explain: pieces ranked by id, runs of
    spaces rewritten as U+2581, no space put before a text."""

    @pytest.mark.parametrize("text", STRESS, ids=range(len(STRESS)))
    def test_stress_corpus(self, gemma3: Tokenizer, gemma3_reference: Any, text: str) -> None:
        assert same_ids(gemma3, gemma3_reference, text)

    @given(text=any_text)
    @shared_fixtures
    def test_any_text(self, gemma3: Tokenizer, gemma3_reference: Any, text: str) -> None:
        assert same_ids(gemma3, gemma3_reference, text)
        ids = gemma3.encode(text, add_special_tokens=False)
        assert gemma3.decode(ids) == gemma3_reference.decode(ids)
        assert gemma3.decode(ids) == text.replace("▁", " ")

    def test_what_the_file_says(self, gemma3: Tokenizer) -> None:
        assert gemma3.vocab_size == 262144
        assert (gemma3.bos_id, gemma3.eos_id) == (2, 1)
        assert gemma3.adds_bos
        assert gemma3.stop_ids == {1, 106}  # the file has no eot; <end_of_turn> is known by name
        assert not gemma3.strips_leading_space


class TestSentencePiece:
    """Reference: the SentencePiece library, on a model trained here."""

    @given(text=any_text)
    @shared_fixtures
    def test_ids_and_text(
        self,
        sentencepiece_style: Tokenizer,
        spm: sentencepiece.SentencePieceProcessor,
        text: str,
    ) -> None:
        # A user-defined piece is cut out before SentencePiece's leading space is put in, by every
        # tokenizer built on added tokens; the library itself puts the space first.
        if "<think>" in text or "\x00" in text:
            return
        ids = sentencepiece_style.encode(text, add_special_tokens=False)
        assert ids == spm.encode(text)
        assert sentencepiece_style.decode(ids) == text.replace("▁", " ")

    def test_bos_and_user_defined_pieces(self, sentencepiece_style: Tokenizer) -> None:
        ids = sentencepiece_style.encode("a<think>b</s>")
        think = sentencepiece_style.token_to_id("<think>")
        assert ids[0] == sentencepiece_style.bos_id
        assert think in ids
        assert sentencepiece_style.eos_id not in ids
        assert not sentencepiece_style.is_special(think)

    def test_without_space_prefix(self, spm: sentencepiece.SentencePieceProcessor) -> None:
        metadata = spm_metadata(spm) | {"tokenizer.ggml.add_space_prefix": False}
        tokenizer = from_gguf_metadata(metadata)
        with_prefix = from_gguf_metadata(spm_metadata(spm))
        assert tokenizer.encode(" hello") == with_prefix.encode("hello")
        assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"

    @pytest.mark.parametrize(("bos", "eos"), [(True, True), (False, True), (False, False)])
    def test_flags(self, spm: sentencepiece.SentencePieceProcessor, bos: bool, eos: bool) -> None:
        flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        tokenizer = from_gguf_metadata(spm_metadata(spm) | flags)
        middle = tokenizer.encode("hello", add_special_tokens=False)
        before = [tokenizer.bos_id] if bos else []
        after = [tokenizer.eos_id] if eos else []
        assert tokenizer.encode("hello") == [*before, *middle, *after]
        assert (tokenizer.adds_bos, tokenizer.adds_eos) == (bos, eos)


def byte_level_metadata(pre: str | None = "gpt-2", **more: Any) -> dict[str, Any]:
    """GGUF metadata of the small byte-level tokenizer."""
    import json

    core = byte_level_core()
    state = json.loads(core.to_str())
    vocab = core.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [TokenType.NORMAL] * len(tokens)
    for token_id, added in core.get_added_tokens_decoder().items():
        types[token_id] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<s>"],
        "tokenizer.ggml.eos_token_id": vocab["</s>"],
    }
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in more.items()})
    return {key: value for key, value in metadata.items() if value is not None}


@given(text=any_text)
@shared_fixtures
def test_byte_level_equals_the_tokenizer_it_was_made_from(byte_level: Tokenizer, text: str) -> None:
    tokenizer = from_gguf_metadata(_SMALL)
    assert tokenizer.encode(text) == byte_level.encode(text)
    assert tokenizer.encode(text, parse_special=True) == byte_level.encode(text, parse_special=True)
    assert tokenizer.decode(tokenizer.encode(text)) == text


_SMALL = byte_level_metadata()


def test_bos_follows_the_pre_tokenizer_unless_the_file_says() -> None:
    assert not from_gguf_metadata(byte_level_metadata("gpt-2")).adds_bos
    assert from_gguf_metadata(byte_level_metadata("llama-bpe")).adds_bos
    assert not from_gguf_metadata(byte_level_metadata("llama-bpe", add_bos_token=False)).adds_bos


def test_user_defined_tokens_stay_whole_and_are_not_special() -> None:
    tokenizer = from_gguf_metadata(_SMALL)
    think = tokenizer.token_to_id("<think>")
    assert think is not None
    assert tokenizer.encode("a<think>b").count(think) == 1
    assert not tokenizer.is_special(think)
    assert tokenizer.decode([think]) == "<think>"


def test_stop_ids_are_eos_eot_eom_and_known_names() -> None:
    tokenizer = from_gguf_metadata(_SMALL | {"tokenizer.ggml.eot_token_id": 7})
    names = {tokenizer.token_to_id(text) for text in ("</s>", "<|im_end|>")}
    assert tokenizer.stop_ids == names | {7}


def test_whole_words_win_over_merges_where_the_model_says_so() -> None:
    core = byte_level_core()
    tokens = [*_SMALL["tokenizer.ggml.tokens"], "zqx"]
    extra = {
        "tokens": tokens,
        "token_type": [*_SMALL["tokenizer.ggml.token_type"], int(TokenType.NORMAL)],
    }
    assert core.token_to_id("zqx") is None
    whole = from_gguf_metadata(byte_level_metadata("llama-bpe", **extra))
    merged = from_gguf_metadata(byte_level_metadata("gpt-2", **extra))
    assert whole.encode("zqx", add_special_tokens=False) == [len(tokens) - 1]
    assert len(merged.encode("zqx", add_special_tokens=False)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "klingon"}, "klingon.*Known:.*gpt-2.*smollm"),
        ({"pre": "default"}, "default.*guess"),
        ({"pre": None}, "names no pre-tokenizer"),
        ({"model": "bert"}, "bert.*known: gpt2, llama"),
        ({"model": None}, "not a vocabulary"),
        ({"merges": None}, "merges: missing"),
        ({"merges": ["nospace"]}, "nospace"),
        ({"merges": ["qqq zzz"]}, "merges"),
        ({"tokens": []}, "tokens: missing or empty"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "token 2 repeats 'a'"),
        ({"token_type": [1, 1]}, "2 types for"),
        ({"tokens": ["a\udcff"], "token_type": [1]}, "not valid UTF-8"),
        ({"eos_token_id": 10**6}, "eos token id 1000000 is outside"),
        ({"bos_token_id": 10**6, "add_bos_token": True}, "bos_token_id: 1000000 is outside"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    metadata = dict(_SMALL)
    for key, value in change.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(TokenizerError, match=message):
        from_gguf_metadata(metadata)


def test_a_sentencepiece_vocabulary_needs_scores(
    spm: sentencepiece.SentencePieceProcessor,
) -> None:
    metadata = spm_metadata(spm)
    metadata["tokenizer.ggml.scores"] = metadata["tokenizer.ggml.scores"][:-1]
    with pytest.raises(TokenizerError, match="scores"):
        from_gguf_metadata(metadata)


def test_empty_token_strings_get_a_spelling() -> None:
    tokens = list(_SMALL["tokenizer.ggml.tokens"])
    types = list(_SMALL["tokenizer.ggml.token_type"])
    tokens += ["", ""]
    types += [int(TokenType.UNUSED)] * 2
    tokenizer = from_gguf_metadata(byte_level_metadata(tokens=tokens, token_type=types))
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.encode(SENTENCES[0]) == from_gguf_metadata(_SMALL).encode(SENTENCES[0])
