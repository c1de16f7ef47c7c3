"""Named pre-tokenizers against transformers' statement of the same rules."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import Regex, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from steppe.errors import TokenizerError
from steppe.text.pre_tokenizers import PRE_TOKENIZERS, named_pre_tokenizer
from tests.text.corpus import any_text

shared_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def cut(pre_tokenizer: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def reference(name: str) -> pre_tokenizers.PreTokenizer:
    """transformers' expression where it has one; else GPT-2's as published, digits first."""
    regex = GGUF_PRE_TOKENIZER_SPLITS.get(name)
    steps = [pre_tokenizers.Split(Regex(regex or GPT2), behavior="isolated")]
    if regex is None and PRE_TOKENIZERS[name].single_digits:
        steps.insert(0, pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
@given(text=any_text)
@shared_fixtures
def test_cuts_where_the_reference_does(name: str, text: str) -> None:
    assert cut(named_pre_tokenizer(name).pre_tokenizer(), text) == cut(reference(name), text)


def test_qwen_composes_its_text_first() -> None:
    normalizer = named_pre_tokenizer("qwen2").normalizer()
    assert normalizer is not None
    assert normalizer.normalize_str("e\u0301") == "é"
    assert named_pre_tokenizer("llama-bpe").normalizer() is None


@pytest.mark.parametrize("name", [None, "", "default", "GPT-2", "nonesuch"])
def test_unknown_names_are_refused_with_the_known_ones(name: str | None) -> None:
    with pytest.raises(TokenizerError, match=r"Known: .*llama-bpe.*smollm"):
        named_pre_tokenizer(name)
