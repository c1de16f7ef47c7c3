"""Small tokenizers of every kind, built here, and the two real ones beside their references."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import sentencepiece
from tokenizers import Tokenizer as Core
from tokenizers import decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from steppe.formats.checkpoint import open_checkpoint
from steppe.text.gguf_tokenizer import TokenType, from_gguf_metadata
from steppe.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from steppe.formats.checkpoint import Checkpoint

SENTENCES = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def main(args):\n    return [x for x in args if x]\n",
    "Café déjà vu naïve façade, 123 4567, hello hello world world.",
    "  spaces   between    words\tand tabs\n\nand lines",
    "Он сказал привет, and she said 你好 to the world.",
)
CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def byte_level_core() -> Core:
    """A byte-level BPE of about 400 tokens, trained on SENTENCES; control tokens come last."""
    core = Core(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES * 3, trainer)
    core.add_special_tokens(list(CONTROL))
    core.add_tokens(["<think>"])
    return core


def byte_level_tokenizer(*, adds_bos: bool) -> Tokenizer:
    core = byte_level_core()
    bos, eos = core.token_to_id("<s>"), core.token_to_id("</s>")
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single=["<s>", "$A"], pair=["<s>", "$A", "$B:1"], special_tokens=[("<s>", bos)]
        )
    return Tokenizer(core, bos_id=bos, eos_id=eos)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return byte_level_tokenizer(adds_bos=False)


@pytest.fixture(scope="session")
def byte_level_bos() -> Tokenizer:
    return byte_level_tokenizer(adds_bos=True)


@pytest.fixture(scope="session")
def spm() -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE with byte fallback, set up as Llama 2's: nothing normalised."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def spm_metadata(spm: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """What a converter writes into a GGUF file for this SentencePiece model."""

    def kind(token_id: int) -> TokenType:
        if spm.is_unknown(token_id):
            return TokenType.UNKNOWN
        if spm.is_control(token_id):
            return TokenType.CONTROL
        if spm.is_byte(token_id):
            return TokenType.BYTE
        if spm.id_to_piece(token_id) == "<think>":
            return TokenType.USER_DEFINED
        return TokenType.NORMAL

    ids = range(spm.get_piece_size())
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [spm.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [spm.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [int(kind(i)) for i in ids],
        "tokenizer.ggml.bos_token_id": spm.bos_id(),
        "tokenizer.ggml.eos_token_id": spm.eos_id(),
        "tokenizer.ggml.unknown_token_id": spm.unk_id(),
    }


@pytest.fixture(scope="session")
def sentencepiece_style(spm: sentencepiece.SentencePieceProcessor) -> Tokenizer:
    return from_gguf_metadata(spm_metadata(spm))


@pytest.fixture(scope="session")
def metaspace_first() -> Tokenizer:
    """Spaces as U+2581, one put before a text but not after a control token (newer Mistral)."""
    core = Core(BPE(unk_token="<unk>"))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", *CONTROL], show_progress=False
    )
    core.train_from_iterator(SENTENCES * 3, trainer)
    return Tokenizer(core, bos_id=1, eos_id=2)


@pytest.fixture(scope="session")
def smollm2_checkpoint(smollm2_gguf: Path) -> Checkpoint:
    return open_checkpoint(smollm2_gguf)


@pytest.fixture(scope="session")
def smollm2(smollm2_checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_checkpoint(smollm2_checkpoint)


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_gguf: Path) -> Any:
    """transformers' own conversion of the same file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="session")
def smollm2_corrected(smollm2_reference: Any) -> Any:
    """That conversion with the digit step of SmolLM2's own tokenizer.json, which it leaves out."""
    from transformers import PreTrainedTokenizerFast

    core = Core.from_str(smollm2_reference.backend_tokenizer.to_str())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), core.pre_tokenizer]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.fixture(scope="session")
def gemma3_checkpoint(gemma3_gguf: Path) -> Checkpoint:
    return open_checkpoint(gemma3_gguf)


@pytest.fixture(scope="session")
def gemma3(gemma3_checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_checkpoint(gemma3_checkpoint)


@pytest.fixture(scope="session")
def gemma3_reference(gemma3_gguf: Path) -> Any:
    """transformers' own conversion of the same file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gemma3_gguf.parent, gguf_file=gemma3_gguf.name)
