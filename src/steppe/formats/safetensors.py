"""Hugging Face directories: ``config.json`` beside weights in safetensors files.

The header is parsed here, not with the ``safetensors`` package: its numpy side has no bfloat16 and
copies every tensor, and we want read-only views of the map without torch. The format is small: a
64-bit little-endian header length, a JSON object of ``name -> {dtype, shape, data_offsets}``, and
the data, which the tensors must cover without hole or overlap. The package is the tests' oracle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from steppe.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from steppe.formats.jsonfile import parse_object, read_object
from steppe.formats.mapped import MappedFile, shorten
from steppe.formats.tensor import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["HFDirectory", "read_hf_config", "read_hf_directory", "read_safetensors"]

_LENGTH: Final = Struct("<Q")
# The package's own bound.
_MAX_HEADER: Final = 100_000_000
_MAX_DIMENSIONS: Final = 8
_ITEM_SIZES: Final = {"F32": 4, "F16": 2, "BF16": 2}

_CONFIG: Final = "config.json"
_GENERATION_CONFIG: Final = "generation_config.json"
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"

# Where packed formats announce themselves: keys of config.json, and files beside it.
_PACKING_KEYS: Final = ("quantization_config", "compression_config", "quantization")
_PACKING_FILES: Final = {
    "quantize_config.json": "GPTQ or AWQ",
    "quant_config.json": "AWQ",
    "hf_quant_config.json": "ModelOpt",
}
_PACKING_TITLES: Final = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "fbgemm_fp8": "FBGEMM FP8",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
}


@dataclass(frozen=True, slots=True)
class HFDirectory:
    """A Hugging Face checkpoint: both configurations, tensors by name, and the open maps."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: tuple[MappedFile, ...]


def read_hf_directory(directory: Path) -> HFDirectory:
    """Open the checkpoint in ``directory``. The maps stay open until the caller closes them.

    With an index, the index says which tensors there are; a shard may hold others. Raises
    `ModelNotFoundError` if config or weights are missing, `CheckpointError` if files are truncated,
    corrupt or inconsistent, and `UnsupportedModelError`, naming it, for a packed format, a tensor
    type we do not read, or weights that exist only as pickles.
    """
    config, generation_config = read_hf_config(directory)
    files: list[MappedFile] = []
    try:
        single = directory / _WEIGHTS
        index = directory / _INDEX
        if single.is_file():
            files.append(MappedFile(single))
            tensors = read_safetensors(files[0])
        elif index.is_file():
            tensors = _read_shards(index, files)
        else:
            raise _no_weights(directory)
    except BaseException:
        for file in files:
            file.close()
        raise
    return HFDirectory(config, generation_config, tensors, tuple(files))


def read_hf_config(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json`` and ``generation_config.json`` (``{}`` if there is none) of ``directory``.

    Raises `UnsupportedModelError` if they announce a packed weight format.
    """
    config = read_object(directory / _CONFIG)
    _refuse_packed(directory, config)
    path = directory / _GENERATION_CONFIG
    return config, read_object(path) if path.is_file() else {}


def _refuse_packed(directory: Path, config: Mapping[str, Any]) -> None:
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in _PACKING_KEYS:
            packing = holder.get(key)
            if packing is None or packing is False:
                continue
            method = packing.get("quant_method") if isinstance(packing, dict) else packing
            if method is None and isinstance(packing, dict):
                method = _guess_method(key, packing)
            title = _PACKING_TITLES.get(str(method).lower(), str(method))
            raise UnsupportedModelError(
                f"{directory}: the weights are packed with {shorten(title)} ({key} in config.json);"
                " use the unpacked model or a GGUF file"
            )
    for name, title in _PACKING_FILES.items():
        if (directory / name).is_file():
            raise UnsupportedModelError(
                f"{directory}: the weights are packed with {title} ({name}); "
                "use the unpacked model or a GGUF file"
            )


def _guess_method(key: str, packing: Mapping[str, Any]) -> str:
    if packing.get("load_in_4bit") or packing.get("load_in_8bit"):
        return "bitsandbytes"
    return "MLX" if key == "quantization" else "an unnamed method"


def _no_weights(directory: Path) -> ModelNotFoundError | UnsupportedModelError:
    names = sorted(entry.name for entry in directory.iterdir())
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        return UnsupportedModelError(
            f"{directory}: the weights are Python pickles ({pickles[0]}), which can run code when "
            "loaded and are not read; convert the model to safetensors"
        )
    found = ", ".join(name for name in names if name.endswith((".safetensors", ".gguf")))
    return ModelNotFoundError(
        f"{directory}: neither {_WEIGHTS} nor {_INDEX} is there"
        + (f"; found {found}" * bool(found))
    )


def _read_shards(index: Path, files: list[MappedFile]) -> dict[str, StoredTensor]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or no object")
    shards: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or not shard:
            raise CheckpointError(
                f"{index}: tensor {shorten(name)} is said to be in {shorten(str(shard))}, which is "
                "no plain file name"
            )
        if shard not in shards:
            path = index.with_name(shard)
            if not path.is_file():
                raise CheckpointError(f"{path}: this shard is missing")
            files.append(MappedFile(path))
            shards[shard] = read_safetensors(files[-1])
        if name not in shards[shard]:
            raise CheckpointError(f"{index}: tensor {shorten(name)} is not in {shard}")
        tensors[name] = shards[shard][name]
    return tensors


def read_safetensors(file: MappedFile) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, in the order of its header.

    Raises `CheckpointError` for a damaged file, `UnsupportedModelError` naming the first tensor
    of a type other than F32, F16 and BF16.
    """
    path = file.path
    if file.size < _LENGTH.size:
        raise CheckpointError(f"{path}: {file.size} bytes are no safetensors file")
    header_size = _LENGTH.unpack_from(file.buffer, 0)[0]
    base = _LENGTH.size + header_size
    if header_size > _MAX_HEADER or base > file.size:
        raise CheckpointError(
            f"{path}: a header of {header_size} bytes cannot be in a file of {file.size}: "
            "it is truncated or corrupt"
        )
    # JSON has no zero byte and tensor data is full of them: a length that reaches into the data is
    # noticed before any of it is decoded.
    if file.find(b"\0", _LENGTH.size, base) >= 0:
        raise CheckpointError(f"{path}: the header holds zero bytes: it is corrupt")
    header = parse_object(file.buffer[_LENGTH.size : base], f"{path} (header)")
    header.pop("__metadata__", None)
    room = file.size - base
    placed: list[tuple[int, int, str]] = []
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        try:
            dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: tensor {shorten(name)} is badly described") from error
        if not isinstance(dtype, str) or not isinstance(shape, list):
            raise CheckpointError(f"{path}: tensor {shorten(name)} is badly described")
        if dtype not in _ITEM_SIZES:
            raise UnsupportedModelError(
                f"{path}: tensor {shorten(name)} has type {shorten(dtype)}, which is not supported"
            )
        if len(shape) > _MAX_DIMENSIONS or not all(map(_is_size, (*shape, start, end))):
            raise CheckpointError(
                f"{path}: tensor {shorten(name)} has an impossible shape or place"
            )
        if not start <= end <= room or end - start != math.prod(shape) * _ITEM_SIZES[dtype]:
            raise CheckpointError(
                f"{path}: tensor {shorten(name)} ({dtype}, {tuple(shape)}) does not fit bytes "
                f"{start} to {end} of {room}: the file is truncated or corrupt"
            )
        placed.append((start, end, name))
        view = file.view[base + start : base + end]
        tensors[name] = StoredTensor(name, tuple(shape), dtype, view)
    _check_cover(path, placed, room)
    return tensors


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _check_cover(path: Path, placed: list[tuple[int, int, str]], room: int) -> None:
    reached = 0
    for start, end, name in sorted(placed):
        if start != reached:
            problem = "overlaps another tensor" if start < reached else "follows a hole"
            raise CheckpointError(f"{path}: tensor {shorten(name)} {problem}")
        reached = end
    if reached != room:
        raise CheckpointError(f"{path}: {room - reached} bytes of data belong to no tensor")
