"""Hugging Face directories against the ``safetensors`` package, and against files that lie."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as save_numpy
from safetensors.torch import save_file

from steppe.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError
from steppe.formats.mapped import MappedFile
from steppe.formats.safetensors import read_hf_directory, read_safetensors

if TYPE_CHECKING:
    from pathlib import Path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def raw_file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file whose header may lie; ``header`` is bytes or made JSON."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "a.weight": torch.randn(3, 5, generator=generator),
        "b.weight": torch.randn(2, 3, 4, generator=generator).to(torch.float16),
        "c.weight": torch.randn(7, generator=generator).to(torch.bfloat16),
        "d.scalar": torch.randn((), generator=generator),
        "e.empty": torch.empty(0, 4),
    }
    return tensors


@pytest.fixture
def directory(tmp_path: Path, seed: int) -> Path:
    write_json(tmp_path / "config.json", {"model_type": "llama", "hidden_size": 4})
    write_json(tmp_path / "generation_config.json", {"temperature": 0.6, "eos_token_id": [1, 2]})
    save_file(random_tensors(seed), tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_a_directory_is_read(directory: Path, seed: int) -> None:
    found = read_hf_directory(directory)
    assert found.config == {"model_type": "llama", "hidden_size": 4}
    assert found.generation_config == {"temperature": 0.6, "eos_token_id": [1, 2]}
    expected = random_tensors(seed)
    assert set(found.tensors) == set(expected)
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    for name, tensor in expected.items():
        mine = found.tensors[name]
        assert mine.name == name
        assert mine.dtype == names[tensor.dtype]
        assert mine.shape == tuple(tensor.shape)
        assert mine.nbytes == tensor.numel() * tensor.element_size()
        assert not mine.data.flags.writeable
        np.testing.assert_array_equal(mine.dequantize(), tensor.float().numpy())
    assert [file.path for file in found.files] == [directory / "model.safetensors"]


def test_a_missing_generation_config_is_empty(directory: Path) -> None:
    (directory / "generation_config.json").unlink()
    assert read_hf_directory(directory).generation_config == {}


def test_tensor_data_is_a_view_of_the_map(directory: Path) -> None:
    save_file({"big": torch.zeros(512, 512)}, directory / "model.safetensors")
    tracemalloc.start()
    try:
        found = read_hf_directory(directory)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.tensors["big"].nbytes == 1 << 20
    assert peak < 1 << 18


# --- shards


@pytest.fixture
def sharded(directory: Path, seed: int) -> Path:
    (directory / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for index, (name, _tensor) in enumerate(random_tensors(seed).items()):
        shard = f"model-0000{index % 2 + 1}-of-00002.safetensors"
        weight_map[name] = shard
    for shard in set(weight_map.values()):
        chosen = {k: v for k, v in random_tensors(seed).items() if weight_map[k] == shard}
        save_file(chosen, directory / shard)
    index_path = directory / "model.safetensors.index.json"
    write_json(index_path, {"metadata": {"total_size": 1}, "weight_map": weight_map})
    return directory


def edit_index(directory: Path, **changes: Any) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    write_json(path, index)


def test_shards_are_read(sharded: Path, seed: int) -> None:
    found = read_hf_directory(sharded)
    expected = random_tensors(seed)
    assert list(found.tensors) == list(expected)
    assert len(found.files) == 2
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found.tensors[name].dequantize(), tensor.float().numpy())


def test_the_index_says_which_tensors_there_are(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["a.weight"]
    write_json(path, index)
    assert "a.weight" not in read_hf_directory(sharded).tensors


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: .*missing"):
        read_hf_directory(sharded)


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    edit_index(sharded, **{"z.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"'z\.weight' is not in model-00001"):
        read_hf_directory(sharded)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "a\\b", "", 7, None])
def test_a_shard_is_a_plain_file_name(sharded: Path, shard: Any) -> None:
    edit_index(sharded, **{"a.weight": shard})
    with pytest.raises(CheckpointError, match="no plain file name"):
        read_hf_directory(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": 1}])
def test_an_index_without_a_map_is_refused(sharded: Path, index: Any) -> None:
    write_json(sharded / "model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match="weight_map"):
        read_hf_directory(sharded)


# --- what we do not read


@pytest.mark.parametrize(
    ("config", "title"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "AWQ"),
        ({"quantization_config": {"quant_method": "gptq"}}, "GPTQ"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "fp8"}}, "FP8"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4"),
        ({"quantization_config": {"quant_method": "brand-new"}}, "brand-new"),
        ({"quantization_config": {}}, "an unnamed method"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "AWQ"),
    ],
)
def test_packed_weights_are_refused_by_name(
    directory: Path, config: dict[str, Any], title: str
) -> None:
    write_json(directory / "config.json", {"model_type": "llama"} | config)
    with pytest.raises(UnsupportedModelError, match=f"packed with '{title}'"):
        read_hf_directory(directory)


@pytest.mark.parametrize("nothing", [None, False])
def test_no_packing_is_no_packing(directory: Path, nothing: Any) -> None:
    write_json(directory / "config.json", {"quantization_config": nothing, "text_config": None})
    assert read_hf_directory(directory).tensors


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("quantize_config.json", "GPTQ or AWQ"),
        ("quant_config.json", "AWQ"),
        ("hf_quant_config.json", "ModelOpt"),
    ],
)
def test_a_packing_file_is_refused(directory: Path, name: str, title: str) -> None:
    write_json(directory / name, {})
    with pytest.raises(UnsupportedModelError, match=f"packed with {title} "):
        read_hf_directory(directory)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int8, torch.bool])
def test_other_tensor_types_are_refused_by_name(directory: Path, dtype: torch.dtype) -> None:
    tensors = {"fine": torch.ones(2), "strange": torch.ones(2).to(dtype)}
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"'strange' has type '(F64|I64|I8|BOOL)'"):
        read_hf_directory(directory)


def test_pickles_are_refused(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(UnsupportedModelError, match=r"pickles \(pytorch_model\.bin\)"):
        read_hf_directory(directory)


def test_missing_weights_are_an_error_that_says_what_is_there(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    with pytest.raises(ModelNotFoundError, match=r"found other\.safetensors"):
        read_hf_directory(directory)


def test_a_missing_config_is_an_error(directory: Path) -> None:
    (directory / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        read_hf_directory(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2]", "object is expected, not list"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b'{"a": ' * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_bad_config_is_an_error_naming_the_file(
    directory: Path, name: str, content: bytes, message: str
) -> None:
    (directory / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_hf_directory(directory)
    assert name in str(caught.value)


# --- files that lie

HUGE = (1 << 64) - 1
DATA = bytes(8)
LIES: dict[str, tuple[bytes, str]] = {
    "seven bytes": (b"\x00" * 7, "7 bytes"),
    "a header longer than the file": (raw_file({}, length=HUGE), "truncated or corrupt"),
    "a header a byte too long": (raw_file({}, length=3), "truncated or corrupt"),
    "a header that is no JSON": (raw_file(b"nonsense"), "not valid JSON"),
    "a header that reaches into the data": (
        raw_file({"a": entry()}, DATA, length=len(json.dumps({"a": entry()})) + 8),
        "zero bytes",
    ),
    "a header that is a list": (raw_file([]), "object is expected"),
    "a header that nests without end": (raw_file(b"[" * 100_000), "not valid JSON"),
    "a tensor that occurs twice": (
        raw_file(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), DATA),
        "'a' occurs twice",
    ),
    "an entry that is a number": (raw_file({"a": 1}), "badly described"),
    "an entry without a type": (raw_file({"a": {"shape": [2], "data_offsets": [0, 8]}}), "badly"),
    "three offsets": (raw_file({"a": entry(offsets=[0, 4, 8])}, DATA), "badly described"),
    "a type that is a list": (raw_file({"a": entry(dtype=["F32"])}, DATA), "badly described"),
    "a shape that is a number": (raw_file({"a": entry(shape=2)}, DATA), "badly described"),
    "a negative size": (raw_file({"a": entry(shape=[-2, -1])}, DATA), "impossible"),
    "a fractional size": (raw_file({"a": entry(shape=[2.0])}, DATA), "impossible"),
    "a size that is true": (raw_file({"a": entry(shape=[2, True])}, DATA), "impossible"),
    "nine dimensions": (raw_file({"a": entry(shape=[1] * 8 + [2])}, DATA), "impossible"),
    "a negative offset": (raw_file({"a": entry(offsets=[-8, 0])}, DATA), "impossible"),
    "sizes beyond 64 bits": (raw_file({"a": entry(shape=[1 << 62, 1 << 62])}, DATA), "not fit"),
    "an end before the start": (raw_file({"a": entry(offsets=[8, 0])}, DATA), "not fit"),
    "a tensor past the end": (raw_file({"a": entry()}, DATA[:-1]), "truncated or corrupt"),
    "a size that is not the shape's": (raw_file({"a": entry(shape=[1])}, DATA), "not fit"),
    "tensors that overlap": (
        raw_file({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
        "'b' overlaps",
    ),
    "tensors with a hole between": (
        raw_file({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)),
        "'b' follows a hole",
    ),
    "data of no tensor": (raw_file({"a": entry()}, bytes(9)), "1 bytes of data belong to no"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_an_error(lie: str, tmp_path: Path) -> None:
    content, message = LIES[lie]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors(MappedFile(path))
    assert str(path) in str(caught.value)


SOUND = save_numpy(
    {
        "a": np.arange(64, dtype=np.float32).reshape(8, 8),
        "b": np.arange(9, dtype=np.float16),
        "c": np.zeros((4, 1 << 14), dtype=np.float32),
    },
    {"format": "np"},
)
HEADER_END = 8 + int.from_bytes(SOUND[:8], "little")


@settings(max_examples=300)
@given(data=st.data())
def test_mutated_headers(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Always a typed error or a sound file, never more memory than the file."""
    damaged = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 3))):
        offset = data.draw(st.integers(0, HEADER_END - 1))
        kind = data.draw(st.sampled_from(["byte", "digit", "cut", "insert", "delete"]))
        if kind == "byte":
            damaged[offset : offset + 1] = bytes([data.draw(st.integers(0, 255))])
        elif kind == "digit":
            header = bytes(damaged[:HEADER_END])
            digits = [at for at in range(8, len(header)) if header[at : at + 1].isdigit()]
            at = data.draw(st.sampled_from(digits or [8]))
            damaged[at : at + 1] = data.draw(
                st.sampled_from([b"0", b"9", b"-1", b"1e9", b"9" * 30])
            )
        elif kind == "cut":
            del damaged[data.draw(st.integers(0, len(damaged))) :]
        elif kind == "insert":
            damaged[offset:offset] = data.draw(st.binary(min_size=1, max_size=8))
        else:
            del damaged[offset : offset + data.draw(st.integers(1, 8))]
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(damaged)
    tracemalloc.start()
    try:
        tensors = read_safetensors(MappedFile(path))
    except ModelError:
        return
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < len(SOUND)
    assert sum(tensor.nbytes for tensor in tensors.values()) <= len(damaged)
    for tensor in tensors.values():
        assert tensor.dequantize().shape == tensor.shape
