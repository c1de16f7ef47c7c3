"""Writes the GGUF form of a transformers model with the gguf package, the way converters do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}


def pair_up(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head from (first half, second half) to rotated pairs side by side."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(np.swapaxes(split, 1, 2).reshape(weight.shape))


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    matrices: str = "F32",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, NDArray[np.float32]] | None = None,
) -> Path:
    """Write ``model``; matrices are stored as ``matrices``, vectors in F32.

    ``metadata`` adds keys without their architecture prefix, or removes them (None); ``tensors``
    adds tensors.
    """
    config = model.config
    name = ARCHITECTURES[config.model_type]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": dim,
    } | (metadata or {})
    writer = gguf.GGUFWriter(path, name)
    writer.add_name(f"tiny {name}")
    for key, value in keys.items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(f"{name}.{key}", value)
            case int():
                writer.add_uint32(f"{name}.{key}", value)
            case float():
                writer.add_float32(f"{name}.{key}", value)
            case _:
                writer.add_string(f"{name}.{key}", value)

    tied = config.tie_word_embeddings
    stored = {
        key: parameter.detach().float().numpy()
        for key, parameter in model.state_dict().items()
        if not (tied and key == "lm_head.weight")
    }
    table = gguf.get_tensor_name_map(_architecture(name), config.num_hidden_layers)
    for key, array in stored.items():
        if ".mlp.experts." in key:
            _add_experts(writer, key, array, matrices)
            continue
        target = table.get_name(key, try_suffixes=(".weight", ".bias"))
        assert target is not None, key
        if name.startswith("gemma") and key.endswith("norm.weight"):
            array = array + np.float32(1)
        if name == "llama" and (".q_proj." in key or ".k_proj." in key):
            array = pair_up(array, heads if ".q_proj." in key else kv_heads)
        _add(writer, target, array, matrices)
    for key, array in (tensors or {}).items():
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


def _add(writer: gguf.GGUFWriter, name: str, array: NDArray[np.float32], kind: str) -> None:
    """GGUF writers reverse dimensions themselves: arrays are given outermost first."""
    if array.ndim == 1 or kind == "F32":
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        return
    quantised = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quantize(array, quantised), raw_dtype=quantised)


def _add_experts(writer: gguf.GGUFWriter, key: str, array: NDArray[np.float32], kind: str) -> None:
    layer = key.split(".")[2]
    if key.endswith("gate_up_proj"):
        gate, up = np.split(array, 2, axis=1)
        _add(writer, f"blk.{layer}.ffn_gate_exps.weight", np.ascontiguousarray(gate), kind)
        _add(writer, f"blk.{layer}.ffn_up_exps.weight", np.ascontiguousarray(up), kind)
    else:
        assert key.endswith("down_proj")
        _add(writer, f"blk.{layer}.ffn_down_exps.weight", array, kind)
