"""What the architectures' configurations have in common.

Each architecture starts from the plain decoder that these functions read (full attention, one
rotary embedding, SiLU) and replaces what it does differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steppe.errors import CheckpointError, UnsupportedModelError
from steppe.models.config import MOST_LAYERS, WIDEST_HEAD, ModelConfig
from steppe.models.fields import Fields
from steppe.models.rope import (
    DEFAULT_THETA,
    extended_positions,
    gguf_rope,
    hf_parameters,
    rope_from_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.backends.tape import Activation
    from steppe.formats.tensor import StoredTensor

__all__ = [
    "gguf_decoder",
    "hf_activation",
    "hf_decoder",
    "layer_types",
    "local_windows",
    "qwen_windows",
]

Tensors = Mapping[str, "StoredTensor"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def hf_decoder(
    config: Mapping[str, Any],
    architecture: str,
    *,
    head_dim: int | None = None,
    tied: bool = False,
    parameters: Mapping[str, Any] | None = None,
    default_theta: float = DEFAULT_THETA,
) -> ModelConfig:
    """The plain decoder that a ``config.json`` describes.

    ``head_dim`` and ``tied`` are what the architecture assumes where the file is silent (None: the
    width divided by the heads). ``parameters`` are the rope parameters if the file has them
    elsewhere than usual. Raises `CheckpointError` naming a field that cannot be,
    `UnsupportedModelError` naming one we do not run.
    """
    fields = Fields(config)
    hidden = fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers", maximum=MOST_LAYERS)
    heads = fields.integer("num_attention_heads")
    if fields.get("head_dim") is None and head_dim is None:
        head_dim = _even_share(hidden, heads, "hidden_size", "num_attention_heads")
    dim = fields.integer("head_dim", head_dim, maximum=WIDEST_HEAD)
    if parameters is None:
        parameters = hf_parameters(config)
    rope = rope_from_parameters(parameters, config, dim, default_theta=default_theta)
    return ModelConfig(
        architecture=architecture,
        name=fields.text("_name_or_path", "") or architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=dim,
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=extended_positions(parameters, config),
        tie_word_embeddings=fields.flag("tie_word_embeddings", tied),
        windows=(None,) * layers,
        ropes=(rope,) * layers,
        query_scale=dim**-0.5,
        activation=hf_activation(fields, "hidden_act", "silu"),
    )


def hf_activation(fields: Fields, key: str, default: str) -> Activation:
    """The activation of the gate that a field names. Raises `UnsupportedModelError` naming it."""
    name = fields.text(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"{fields.name(key)} {name[:40]!r} is not supported")
    return _ACTIVATIONS[name]


def layer_types(fields: Fields, layers: int) -> tuple[bool, ...] | None:
    """Which layers are local, as ``layer_types`` says; None if it says nothing."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"does not describe {layers} layers", kinds)
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{fields.name('layer_types')}: {str(kind)[:40]!r} is not supported"
            )
    return tuple(kind == "sliding_attention" for kind in kinds)


def local_windows(local: Sequence[bool], window: int | None) -> tuple[int | None, ...]:
    """The windows of layers some of which are local."""
    if window is None and any(local):
        raise CheckpointError("sliding_window is missing, but some layers are local")
    return tuple(window if is_local else None for is_local in local)


def qwen_windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Qwen's windows: off unless ``use_sliding_window``, then in all layers from
    ``max_window_layers`` on, unless ``layer_types`` says which.
    """
    fields = Fields(config)
    used = fields.flag("use_sliding_window", False)
    window = fields.optional_integer("sliding_window", 4096) if used else None
    local = layer_types(fields, layers)
    if local is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        local = tuple(window is not None and layer >= first for layer in range(layers))
    return local_windows(local, window)


def gguf_decoder(
    metadata: Mapping[str, Any],
    tensors: Tensors,
    architecture: str,
    *,
    gguf_architecture: str | None = None,
    experts: bool = False,
    window: bool = False,
) -> ModelConfig:
    """The plain decoder that GGUF metadata describes. Raises as `hf_decoder` does.

    The vocabulary is as large as the embedding; the head is tied if there is no ``output.weight``;
    projections have the biases that are there. ``experts`` and ``window`` say that the architecture
    looks after these itself: for others they are refused, not ignored.
    """
    prefix = gguf_architecture or architecture
    fields = Fields(metadata, f"{prefix}.")
    if not experts and fields.integer("expert_count", 0, minimum=0):
        raise UnsupportedModelError(
            f"{fields.name('expert_count')}: experts are not supported here"
        )
    if not window and fields.integer("attention.sliding_window", 0, minimum=0):
        raise UnsupportedModelError(
            f"{fields.name('attention.sliding_window')}: the layers it applies to are not stated"
        )
    hidden = fields.integer("embedding_length")
    layers = fields.integer("block_count", maximum=MOST_LAYERS)
    heads = fields.integer("attention.head_count")
    if fields.get("attention.key_length") is None:
        dim = _even_share(
            hidden, heads, fields.name("embedding_length"), fields.name("attention.head_count")
        )
    else:
        dim = fields.integer("attention.key_length", maximum=WIDEST_HEAD)
    if fields.integer("attention.value_length", dim) != dim:
        raise UnsupportedModelError(
            f"{fields.name('attention.value_length')}: values of another length than keys"
        )
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("token_embd.weight is missing or no matrix")
    rope = gguf_rope(metadata, tensors, prefix, dim)
    positions = fields.integer("context_length")
    if fields.text("rope.scaling.type", "none") == "yarn":
        trained = fields.integer("rope.scaling.original_context_length", positions)
        positions = max(positions, int(trained * fields.number("rope.scaling.factor", 1.0)))
    return ModelConfig(
        architecture=architecture,
        name=Fields(metadata).text("general.name", architecture),
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=dim,
        intermediate_size=fields.integer("feed_forward_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_positions=positions,
        tie_word_embeddings="output.weight" not in tensors,
        windows=(None,) * layers,
        ropes=(rope,) * layers,
        query_scale=fields.number("attention.scale", dim**-0.5),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
    )


def _even_share(whole: int, parts: int, whole_name: str, parts_name: str) -> int:
    if whole % parts:
        raise CheckpointError(f"{parts_name}: {whole_name} {whole} is not {parts} equal heads")
    return whole // parts
