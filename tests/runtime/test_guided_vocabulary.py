"""How a grammar reads our vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from steppe.formats.checkpoint import open_checkpoint
from steppe.request import Guided
from steppe.runtime.guided.compiler import GrammarCompiler
from steppe.runtime.guided.state import GuidedState
from steppe.runtime.guided.vocabulary import LONGEST_REMEMBERED
from steppe.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the tokenizer is asked for, in order."""
    texts: list[str] = []
    real = Tokenizer.encode_parts

    def counting(self: Tokenizer, parts: Sequence[int | str]) -> list[int]:
        texts.extend(part for part in parts if isinstance(part, str))
        return real(self, parts)

    monkeypatch.setattr(Tokenizer, "encode_parts", counting)
    return texts


def written(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> str:
    """What a grammar of one text says, a token at a time."""
    state = GuidedState(compiler.prepare(Guided(choice=[text])).compiled, tokenizer.stop_ids)
    said: list[int] = []
    while (token_id := state.only()) is not None:
        said.append(token_id)
        state.accept(token_id)
    assert state.error is None
    return tokenizer.decode(said)


def test_what_is_forced_again_is_not_tokenized_again(
    smollm2_gguf: Path, encoded: list[str]
) -> None:
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(smollm2_gguf))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.stop_ids)
    text = "the name of a property"
    assert written(compiler, tokenizer, text) == text
    assert encoded
    encoded.clear()
    assert written(compiler, tokenizer, text) == text
    assert encoded == []
    # Strangers write long texts, and many: those are not kept.
    text *= 1 + LONGEST_REMEMBERED // len(text)
    for _ in range(2):
        encoded.clear()
        assert written(compiler, tokenizer, text) == text
        assert any(len(one) > LONGEST_REMEMBERED for one in encoded)
