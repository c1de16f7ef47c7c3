"""Tokenizers from Hugging Face directories, against transformers reading the same directory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import processors

from steppe.errors import TokenizerError
from steppe.text.hf_tokenizer import from_directory
from tests.text.conftest import byte_level_core
from tests.text.corpus import STRESS

if TYPE_CHECKING:
    from pathlib import Path

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def write(folder: Path, **files: Any) -> Path:
    """A model directory with the small tokenizer and the given JSON files."""
    byte_level_core().save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), "utf-8")
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {},
        NAMED,
        {**NAMED, "add_bos_token": True},
        {**NAMED, "add_bos_token": True, "add_eos_token": True},
        {**NAMED, "add_bos_token": False, "add_eos_token": False},
        {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>"},
        {
            **NAMED,
            "added_tokens_decoder": {
                "406": {"content": "<|new|>", "special": True, "normalized": False}
            },
        },
    ],
)
def test_ids_are_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    if "added_tokens_decoder" in config:
        size = byte_level_core().get_vocab_size()
        config["added_tokens_decoder"] = {
            str(size): next(iter(config["added_tokens_decoder"].values()))
        }
    folder = write(tmp_path, tokenizer_config=config)
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = from_directory(folder)
    for text in (*STRESS, "a<|new|>b<s>"):
        for parsed in (True, False):
            ids = reference(text, split_special_tokens=not parsed).input_ids
            if parsed and text.startswith("<s>"):
                continue
            assert tokenizer.encode(text, parse_special=parsed) == ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(
            reference(text, split_special_tokens=True).input_ids, skip_special_tokens=True
        )
    if "bos_token" in config:
        assert (tokenizer.bos_id, tokenizer.eos_id) == (
            reference.bos_token_id,
            reference.eos_token_id,
        )


def test_the_files_own_frame_is_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer_config={**NAMED, "add_bos_token": False})
    core = byte_level_core()
    bos, eos = core.token_to_id("<s>"), core.token_to_id("</s>")
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1",
        special_tokens=[("<s>", bos), ("</s>", eos)],
    )
    core.save(str(folder / "tokenizer.json"))
    tokenizer = from_directory(folder)
    assert tokenizer.encode("hi") == core.encode("hi").ids
    assert (tokenizer.adds_bos, tokenizer.adds_eos) == (True, True)
    assert tokenizer.encode("hi", add_special_tokens=False) == core.encode("hi").ids[1:-1]


def test_named_tokens_may_come_from_the_special_tokens_map(tmp_path: Path) -> None:
    tokenizer = from_directory(write(tmp_path, special_tokens_map=NAMED))
    assert tokenizer.token_text(tokenizer.eos_id or 0) == "</s>"
    assert tokenizer.stop_ids == {tokenizer.eos_id}


def test_added_tokens_json_adds(tmp_path: Path) -> None:
    size = byte_level_core().get_vocab_size()
    tokenizer = from_directory(write(tmp_path, added_tokens={"<extra>": size}))
    assert tokenizer.encode("a<extra>b")[1] == size
    assert tokenizer.vocab_size == size + 1


def test_an_id_that_contradicts_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"'<extra>' the id 9999"):
        from_directory(write(tmp_path, added_tokens={"<extra>": 9999}))


@pytest.mark.parametrize("other", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_other_vocabularies_are_refused_by_name(tmp_path: Path, other: str) -> None:
    (tmp_path / other).write_bytes(b"x")
    with pytest.raises(TokenizerError, match=rf"no tokenizer\.json; {other} is not read"):
        from_directory(tmp_path)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json\. Save"):
        from_directory(tmp_path)


@pytest.mark.parametrize(("name", "text"), [("tokenizer", "{"), ("tokenizer_config", "{x")])
def test_broken_files_are_named(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path)
    (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(TokenizerError, match=rf"{name}\.json"):
        from_directory(tmp_path)


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="JSON object"):
        from_directory(write(tmp_path, tokenizer_config=[1]))
