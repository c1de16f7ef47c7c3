"""A checkpoint of either kind: what it says, its identity, and its end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from steppe.errors import CheckpointError
from steppe.formats.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from tests.formats.build import random_blocks, write_gguf


@pytest.fixture
def gguf_file(tmp_path: Path, rng: np.random.Generator) -> Path:
    path = tmp_path / "tiny.gguf"
    tensors = {"a": ("Q4_0", (4, 64), random_blocks(rng, "Q4_0", (4, 64)))}
    tokens = ("array", ["<s>", "x"])
    write_gguf(path, tensors, {"general.name": ("string", "Tiny"), "tokens": tokens})
    return path


@pytest.fixture
def hf_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-hf"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "generation_config.json").write_text(json.dumps({"top_k": 3}))
    save_file({"w": torch.ones(2, 3, dtype=torch.bfloat16)}, directory / "model.safetensors")
    return directory


@pytest.fixture(params=["gguf_file", "hf_directory"])
def path(request: pytest.FixtureRequest) -> Path:
    value: Path = request.getfixturevalue(request.param)
    return value


def test_a_gguf_checkpoint(gguf_file: Path) -> None:
    with open_checkpoint(gguf_file) as checkpoint:
        assert checkpoint.kind == "gguf"
        assert checkpoint.path == gguf_file
        assert checkpoint.name == "Tiny"
        assert checkpoint.config["general.architecture"] == "llama"
        assert list(checkpoint.config["tokens"]) == ["<s>", "x"]
        assert checkpoint.generation_config == {}
        assert checkpoint.files == (gguf_file,)
        assert list(checkpoint.tensors) == ["a"]
        assert isinstance(checkpoint.tensors["a"], StoredTensor)
        assert checkpoint.tensors["a"].dequantize().shape == (4, 64)


def test_a_hugging_face_checkpoint(hf_directory: Path) -> None:
    with open_checkpoint(str(hf_directory)) as checkpoint:
        assert checkpoint.kind == "hf"
        assert checkpoint.path == hf_directory
        assert checkpoint.name == "tiny-hf"
        assert checkpoint.config == {"model_type": "llama"}
        assert checkpoint.generation_config == {"top_k": 3}
        assert {file.name for file in checkpoint.files} == {
            "config.json",
            "generation_config.json",
            "model.safetensors",
        }
        np.testing.assert_array_equal(checkpoint.tensors["w"].dequantize(), np.ones((2, 3)))


def test_a_directory_with_one_gguf_file(gguf_file: Path) -> None:
    assert open_checkpoint(gguf_file.parent).path == gguf_file


def test_closing_ends_the_tensors_and_not_what_was_taken(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    (name,) = checkpoint.tensors
    taken = checkpoint.tensors[name]
    before = taken.dequantize()
    checkpoint.close()
    checkpoint.close()
    for use in (
        lambda: checkpoint.tensors[name],
        lambda: list(checkpoint.tensors),
        lambda: len(checkpoint.tensors),
    ):
        with pytest.raises(CheckpointError, match="closed"):
            use()
    np.testing.assert_array_equal(taken.dequantize(), before)
    if checkpoint.kind == "gguf":
        assert list(checkpoint.config["tokens"]) == ["<s>", "x"]


def test_the_file_is_unmapped_at_the_end(hf_directory: Path) -> None:
    weights = str(hf_directory / "model.safetensors")
    checkpoint = open_checkpoint(hf_directory)
    assert weights in Path("/proc/self/maps").read_text()
    checkpoint.close()
    assert weights not in Path("/proc/self/maps").read_text()


def test_a_kept_tensor_is_unmapped_when_dropped(hf_directory: Path) -> None:
    weights = str(hf_directory / "model.safetensors")
    checkpoint = open_checkpoint(hf_directory)
    kept = checkpoint.tensors["w"].data
    checkpoint.close()
    del checkpoint
    assert weights in Path("/proc/self/maps").read_text()
    del kept
    assert weights not in Path("/proc/self/maps").read_text()


def identity(path: Path) -> str:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.identity


def test_the_identity_follows_the_files(path: Path) -> None:
    first = identity(path)
    assert identity(path) == first
    assert len(bytes.fromhex(first)) == 32
    with open_checkpoint(path) as checkpoint:
        file = checkpoint.files[-1]
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))
    assert identity(path) != first


def test_the_identity_is_of_the_real_file(gguf_file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(gguf_file)
    assert identity(link) == identity(gguf_file)


def test_a_checkpoint_is_immutable(gguf_file: Path) -> None:
    with open_checkpoint(gguf_file) as checkpoint:
        with pytest.raises(AttributeError):
            checkpoint.name = "other"  # type: ignore[misc]
        with pytest.raises(ValueError, match="read-only"):
            checkpoint.tensors["a"].data[0] = 1
        assert isinstance(checkpoint, Checkpoint)
