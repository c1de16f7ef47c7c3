"""Where a checkpoint keeps each parameter of a program.

Parameters are named as in Hugging Face files. What a program needs, and in which shape, is read off
its tape, so the architectures state it once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from steppe.backends.tape import Embed, Linear, MixtureOfExperts, RmsNorm
from steppe.errors import CheckpointError
from steppe.formats.dequant import dequantize
from steppe.formats.mapped import release_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from steppe.backends.tape import Tape
    from steppe.formats.tensor import StoredTensor
    from steppe.models.config import ModelConfig

__all__ = ["MappedWeight", "map_gguf_weights", "map_hf_weights", "parameter_shapes"]

_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_NORM: Final = re.compile(r"norm\.weight$")
_EXPERT: Final = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_ROTATED: Final = re.compile(r"\.self_attn\.([qk])_proj\.(?:weight|bias)$")

# Buffers that old exports carry and programs compute.
_HF_BUFFERS: Final = re.compile(r"rotary_emb\.inv_freq$|self_attn\.(?:masked_bias|bias)$")
# A picture's way into a multimodal checkpoint; its text model runs without.
_HF_VISION: Final = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.")
_HF_NESTED: Final = re.compile(
    r"(?:model\.language_model|language_model\.model|language_model\.(?=lm_head))\.?"
)
# Read with the configuration, or derived from it.
_GGUF_BUFFERS: Final = re.compile(r"rope_freqs\.weight$|blk\.\d+\.attn_rot_embd\.weight$")

_GGUF_TOP: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_GGUF_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_GGUF_POST_NORMS: Final = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True, eq=False)
class MappedWeight:
    """One parameter as a view of the checkpoint: a `steppe.backends.base.WeightTensor`.

    Tied parameters are the same object under both names. Immutable: any thread.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: NDArray[np.uint8]
    row_order: NDArray[np.int64] | None = None
    add: float = 0.0

    def dequantize(self) -> NDArray[np.float32]:
        """A fresh float32 array of ``shape``, rows reordered and ``add`` added."""
        values = dequantize(self.dtype, self.data, self.shape)
        if self.row_order is not None:
            values = values[self.row_order]
        if self.add:
            values += np.float32(self.add)
        return values

    def release(self) -> None:
        """A backend has its own copy now: the file's pages may leave this process's memory."""
        release_pages(self.data)


def parameter_shapes(tape: Tape, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every parameter that a program's operations name, with the shape they want."""
    shapes: dict[str, tuple[int, ...]] = {}
    for op in tape.ops:
        match op:
            case Embed():
                shapes[op.weight] = (vocab_size, tape.widths[op.out])
            case RmsNorm():
                shapes[op.weight] = (tape.widths[op.x] // op.heads,)
            case Linear():
                shapes[f"{op.site}.weight"] = (op.width, tape.widths[op.x])
                if op.bias:
                    shapes[f"{op.site}.bias"] = (op.width,)
            case MixtureOfExperts():
                width = tape.widths[op.x]
                shapes[f"{op.site}.gate.weight"] = (op.num_experts, width)
                for expert in range(op.num_experts):
                    site = f"{op.site}.experts.{expert}"
                    shapes[f"{site}.gate_proj.weight"] = (op.expert_width, width)
                    shapes[f"{site}.up_proj.weight"] = (op.expert_width, width)
                    shapes[f"{site}.down_proj.weight"] = (width, op.expert_width)
            case _:
                pass
    return shapes


def map_hf_weights(
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    *,
    multimodal: bool = False,
) -> dict[str, MappedWeight]:
    """Find the parameters among the tensors of safetensors files.

    Experts are stored one by one, or all gates and ups of a layer in one ``gate_up_proj`` [E, 2 I,
    H] and all downs in one ``down_proj`` [E, H, I]. ``multimodal``: the text model is nested in a
    larger one, the rest of which is left alone. Raises `CheckpointError` listing what is missing,
    left over or of another shape.
    """
    stored = {_without_nesting(name): t for name, t in tensors.items()} if multimodal else tensors
    found: dict[str, MappedWeight] = {}
    used: set[str] = set()
    for name, shape in shapes.items():
        expert = _EXPERT.fullmatch(name)
        if name in stored:
            found[name] = _whole(name, stored[name])
            used.add(name)
        elif expert and (fused := _fused_expert(expert, stored, shape)):
            found[name], source = fused
            used.add(source)
    _tie(found, shapes, config)
    _check(found, shapes, stored)
    left = (name for name in stored if name not in used and not _HF_BUFFERS.search(name))
    _refuse_left_over(name for name in left if not (multimodal and _HF_VISION.match(name)))
    if config.norm_offset:
        for name, weight in found.items():
            if _NORM.search(name):
                found[name] = replace(weight, add=config.norm_offset)
    return found


def map_gguf_weights(
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
) -> dict[str, MappedWeight]:
    """Find the parameters among the tensors of a GGUF file.

    Experts are stacked, [E, out, in]; each becomes a view of its part. Raises as `map_hf_weights`.
    """
    found: dict[str, MappedWeight] = {}
    used: set[str] = set()
    for name in shapes:
        source = gguf_name(name, post_norms=config.post_norms)
        if source not in tensors:
            continue
        used.add(source)
        expert = _EXPERT.fullmatch(name)
        if expert:
            weight = _part(name, tensors[source], int(expert[2]), config)
        else:
            weight = _whole(name, tensors[source])
        if config.interleaved_rope and (rotated := _ROTATED.search(name)):
            heads = config.num_heads if rotated[1] == "q" else config.num_kv_heads
            weight = replace(weight, row_order=halves_from_pairs(heads, config.head_dim))
        found[name] = weight
    _tie(found, shapes, config)
    _check(found, shapes, tensors)
    _refuse_left_over(
        name for name in tensors if name not in used and not _GGUF_BUFFERS.match(name)
    )
    return found


def gguf_name(name: str, *, post_norms: bool = False) -> str:
    """What a GGUF file calls a parameter."""
    expert = _EXPERT.fullmatch(name)
    if expert:
        layer = expert[1].split(".")[2]
        return f"blk.{layer}.ffn_{expert[3]}_exps.weight"
    layered = _LAYER.fullmatch(name)
    if layered:
        table = _GGUF_LAYER | _GGUF_POST_NORMS if post_norms else _GGUF_LAYER
        return f"blk.{layered[1]}.{table[layered[2]]}.{layered[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_GGUF_TOP[stem]}.{kind}"


def halves_from_pairs(heads: int, head_dim: int) -> NDArray[np.int64]:
    """Where the rows of ``heads`` heads, rotated in halves, are in a file that stores the two rows
    of each rotated pair side by side.
    """
    rows = np.arange(heads * head_dim, dtype=np.int64).reshape(heads, head_dim // 2, 2)
    return rows.transpose(0, 2, 1).reshape(-1)


def _whole(name: str, tensor: StoredTensor) -> MappedWeight:
    return MappedWeight(name, tensor.shape, tensor.dtype, tensor.data)


def _part(name: str, tensor: StoredTensor, index: int, config: ModelConfig) -> MappedWeight:
    """Slice ``index`` of a stack. Rows are whole blocks, so a slice is a run of bytes."""
    count = config.experts.count if config.experts else 0
    if len(tensor.shape) != 3 or tensor.shape[0] != count:
        raise CheckpointError(
            f"{tensor.name}: shape {tensor.shape} is not a stack of {count} experts"
        )
    size = tensor.data.size // count
    data = tensor.data[index * size : (index + 1) * size]
    return MappedWeight(name, tensor.shape[1:], tensor.dtype, data)


def _fused_expert(
    expert: re.Match[str], stored: Mapping[str, StoredTensor], shape: tuple[int, ...]
) -> tuple[MappedWeight, str] | None:
    """One expert's projection out of a layer's fused tensor, and that tensor's name."""
    site, index, kind = expert[1], int(expert[2]), expert[3]
    source = f"{site}.down_proj" if kind == "down" else f"{site}.gate_up_proj"
    tensor = stored.get(source)
    if tensor is None:
        return None
    parts = 1 if kind == "down" else 2
    if len(tensor.shape) != 3 or tensor.shape[0] <= index or tensor.shape[1] % parts:
        raise CheckpointError(f"{source}: shape {tensor.shape} is not a stack of experts")
    rows = tensor.shape[1] // parts
    size = tensor.data.size // (tensor.shape[0] * parts)
    place = (index * parts + (kind == "up")) * size
    data = tensor.data[place : place + size]
    weight = MappedWeight(expert[0], (rows, tensor.shape[2]), tensor.dtype, data)
    return weight, source


def _tie(
    found: dict[str, MappedWeight], shapes: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> None:
    """Let the head be the embedding where the configuration says so.

    A file may hold both all the same. Where they differ the head is used: that is what the
    reference does.
    """
    if not config.tie_word_embeddings or _HEAD not in shapes or _EMBEDDING not in found:
        return
    embedding, head = found[_EMBEDDING], found.get(_HEAD)
    if head is None or (
        head.shape == embedding.shape
        and head.dtype == embedding.dtype
        and np.array_equal(head.data, embedding.data)
    ):
        found[_HEAD] = embedding


def _check(
    found: Mapping[str, MappedWeight],
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
) -> None:
    missing = [name for name in shapes if name not in found]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(shapes)} parameters are missing: {_some(missing)}"
        )
    wrong = [name for name, shape in shapes.items() if found[name].shape != shape]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{name}: shape {found[name].shape} in the file, {shapes[name]} in the configuration"
            + (f"; {len(wrong) - 1} more parameters disagree" if wrong[1:] else "")
        )


def _refuse_left_over(names: Iterable[str]) -> None:
    left = list(names)
    if left:
        raise CheckpointError(
            f"{len(left)} tensors are unknown to this architecture and would be ignored: "
            f"{_some(left)}"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(name[:100] for name in names[:8]) + more


def _without_nesting(name: str) -> str:
    """``language_model.model.x`` (old files) or ``model.language_model.x`` as ``model.x``."""
    match = _HF_NESTED.match(name)
    if match is None:
        return name
    rest = name[match.end() :]
    return rest if rest.startswith("lm_head") else f"model.{rest}"
