"""The cache of converted tokenizers: found again, never half believed, never in the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from steppe.errors import TokenizerError
from steppe.text.gguf_tokenizer import from_gguf_metadata
from steppe.text.tokenizer_cache import cached_core, parse_core
from tests.text.conftest import SENTENCES, byte_level_core
from tests.text.test_gguf_tokenizer import byte_level_metadata

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer as Core


class Builder:
    """Counts how often the conversion ran."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> Core:
        self.runs += 1
        return byte_level_core()


def entry(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_the_second_time_reads(tmp_path: Path) -> None:
    build = Builder()
    cores = [cached_core(tmp_path / "new", "identity", build) for _ in range(3)]
    assert build.runs == 1
    assert len({core.to_str() for core in cores}) == 1
    assert entry(tmp_path / "new").is_file()  # and no temporary file is left


def test_another_identity_is_another_entry(tmp_path: Path) -> None:
    build = Builder()
    cached_core(tmp_path, "one", build)
    cached_core(tmp_path, "../two/../../x", build)
    assert build.runs == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_entry_is_rebuilt(tmp_path: Path, seed: int) -> None:
    build = Builder()
    good = cached_core(tmp_path, "identity", build).to_str()
    raw = entry(tmp_path).read_bytes()
    at = seed % len(raw)
    flipped = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
    for damaged in (b"", raw[: len(raw) // 2], flipped, raw + b"x", b"{}"):
        entry(tmp_path).write_bytes(damaged)
        runs = build.runs
        assert cached_core(tmp_path, "identity", build).to_str() == good
        assert build.runs == runs + 1
        assert entry(tmp_path).read_bytes() == raw


def test_a_cache_that_cannot_be_used_is_no_cache(tmp_path: Path) -> None:
    build = Builder()
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    for _ in range(2):
        assert cached_core(blocked, "identity", build).to_str() == byte_level_core().to_str()
    assert cached_core(None, "identity", build).to_str() == byte_level_core().to_str()
    assert build.runs == 3


def test_from_gguf_metadata_needs_no_vocabulary_once_cached(tmp_path: Path) -> None:
    metadata = byte_level_metadata()
    first = from_gguf_metadata(metadata, cache_dir=tmp_path, identity="x")
    for key in ("tokens", "merges", "token_type"):
        del metadata[f"tokenizer.ggml.{key}"]
    second = from_gguf_metadata(metadata, cache_dir=tmp_path, identity="x")
    assert second.encode_batch(SENTENCES) == first.encode_batch(SENTENCES)
    assert (second.stop_ids, second.bos_id) == (first.stop_ids, first.bos_id)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"version": "9"}'])
def test_what_is_no_tokenizer_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(TokenizerError, match="somewhere is not a usable"):
        parse_core(data, "somewhere")
