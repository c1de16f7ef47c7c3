"""Gemma 3, text: five local layers to a global one, each kind with its own rotary embedding; query
and key heads are normalised.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from steppe.errors import UnsupportedModelError
from steppe.models import blocks
from steppe.models.fields import Fields
from steppe.models.gemma2 import embed_scale, gguf_query_scale, refuse_bidirectional
from steppe.models.reading import (
    gguf_decoder,
    hf_activation,
    hf_decoder,
    layer_types,
    local_windows,
)
from steppe.models.rope import default_rope, rope_from_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from steppe.backends.tape import Graph, RopeSpec
    from steppe.models.config import ModelConfig
    from steppe.models.reading import Tensors

__all__ = ["NAME", "build", "from_gguf", "from_hf"]

NAME: Final = "gemma3"

_GLOBAL_THETA: Final = 1_000_000.0
_LOCAL_THETA: Final = 10_000.0
_PATTERN: Final = 6

# As for Gemma 2: the largest model is known by its number of layers.
_LARGEST_LAYERS: Final = 62


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a ``config.json``, the text model's own or a multimodal one around it."""
    text = Fields(config).part("text_config")
    if text:
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}
        # Files of multimodal models leave out what equals the reference's defaults.
        config = {"vocab_size": 262_208, **_SIZES, **config}
    fields = Fields(config)
    refuse_bidirectional(fields)
    if fields.get("attn_logit_softcapping") is not None:
        # The reference reads this field and then does not use it: whom to follow is open.
        raise UnsupportedModelError("attn_logit_softcapping is not supported for gemma3")
    global_parameters, local_parameters = _hf_rope_parameters(fields)
    decoder = hf_decoder(
        {**config, "hidden_act": None},
        NAME,
        head_dim=256,
        tied=True,
        parameters=global_parameters,
        default_theta=_GLOBAL_THETA,
    )
    layers = decoder.num_layers
    pattern = fields.integer("sliding_window_pattern", _PATTERN)
    local = layer_types(fields, layers) or _every(pattern, layers)
    window = fields.optional_integer("sliding_window", 4096)
    local_rope = rope_from_parameters(
        local_parameters, config, decoder.head_dim, default_theta=_LOCAL_THETA
    )
    bias = fields.flag("attention_bias", False)
    return replace(
        decoder,
        windows=local_windows(local, window),
        ropes=_ropes(local, decoder.ropes[0], local_rope),
        query_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        embed_scale=embed_scale(decoder.hidden_size),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        post_norms=True,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        activation=hf_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        norm_offset=1.0,
    )


def from_gguf(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    """Read GGUF metadata. Position scaling concerns the global layers only; norm weights are stored
    with their 1 added.
    """
    metadata = {f"{NAME}.rope.freq_base": _GLOBAL_THETA, **metadata}
    decoder = gguf_decoder(metadata, tensors, NAME, window=True)
    fields = Fields(metadata, f"{NAME}.")
    layers = decoder.num_layers
    local = _every(fields.integer("attention.sliding_window_pattern", _PATTERN), layers)
    local_theta = fields.number("rope.freq_base_swa", _LOCAL_THETA)
    return replace(
        decoder,
        windows=local_windows(local, fields.integer("attention.sliding_window")),
        ropes=_ropes(local, decoder.ropes[0], default_rope(decoder.head_dim, local_theta)),
        query_scale=gguf_query_scale(fields, decoder, _LARGEST_LAYERS),
        embed_scale=embed_scale(decoder.hidden_size),
        qk_norm=True,
        post_norms=True,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        activation="gelu_tanh",
    )


def build(graph: Graph, config: ModelConfig) -> None:
    """Record the operations."""
    blocks.decoder(graph, config, blocks.post_norm_layer)


_SIZES: Final[Mapping[str, int]] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}


def _hf_rope_parameters(fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rope parameters of global and of local layers.

    Today both are in ``rope_parameters``, by layer type. Older files have ``rope_theta`` and
    ``rope_scaling`` for the global layers and ``rope_local_base_freq`` for the local ones.
    """
    nested = fields.part("rope_parameters")
    unknown = sorted(set(nested) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(f"rope_parameters: {unknown[0][:40]!r} is no layer type")
    kinds = Fields(nested, "")
    wide = {**kinds.part("full_attention"), **fields.part("rope_scaling")}
    near = dict(kinds.part("sliding_attention"))
    for parameters, key in ((wide, "rope_theta"), (near, "rope_local_base_freq")):
        if parameters.get("rope_theta") is None and fields.get(key) is not None:
            parameters["rope_theta"] = fields.number(key)
    return wide, near


def _every(pattern: int, layers: int) -> tuple[bool, ...]:
    """Which layers are local, if every ``pattern``-th one is global."""
    return tuple((layer + 1) % pattern != 0 for layer in range(layers))


def _ropes(local: tuple[bool, ...], wide: RopeSpec, near: RopeSpec) -> tuple[RopeSpec, ...]:
    return tuple(near if is_local else wide for is_local in local)
