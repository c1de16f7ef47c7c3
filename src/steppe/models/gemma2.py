"""Gemma 2: soft-capped scores and logits, local and global layers in turn, norms on both sides of
each block, embeddings scaled by the square root of their width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from steppe.errors import UnsupportedModelError
from steppe.models import blocks
from steppe.models.fields import Fields
from steppe.models.reading import (
    gguf_decoder,
    hf_activation,
    hf_decoder,
    layer_types,
    local_windows,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from steppe.backends.tape import Graph
    from steppe.models.config import ModelConfig
    from steppe.models.reading import Tensors

__all__ = [
    "NAME",
    "build",
    "embed_scale",
    "from_gguf",
    "from_hf",
    "gguf_query_scale",
    "refuse_bidirectional",
]

NAME: Final = "gemma2"

# By which `gguf_query_scale` knows the largest model.
_LARGEST_LAYERS: Final = 46


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a ``config.json``. An absent soft-cap has its default, a null one is off."""
    fields = Fields(config)
    refuse_bidirectional(fields)
    decoder = hf_decoder({**config, "hidden_act": None}, NAME, head_dim=256, tied=True)
    layers = decoder.num_layers
    local = layer_types(fields, layers) or tuple(layer % 2 == 0 for layer in range(layers))
    bias = fields.flag("attention_bias", False)
    return replace(
        decoder,
        windows=local_windows(local, fields.optional_integer("sliding_window", 4096)),
        query_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        embed_scale=embed_scale(decoder.hidden_size),
        qkv_bias=bias,
        output_bias=bias,
        post_norms=True,
        attention_softcap=fields.optional_number("attn_logit_softcapping", 50.0),
        logit_softcap=fields.optional_number("final_logit_softcapping", 30.0),
        activation=hf_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        norm_offset=1.0,
    )


def from_gguf(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    """Read GGUF metadata. Norm weights are stored with their 1 added."""
    decoder = gguf_decoder(metadata, tensors, NAME, window=True)
    fields = Fields(metadata, f"{NAME}.")
    layers = decoder.num_layers
    return replace(
        decoder,
        windows=local_windows(
            tuple(layer % 2 == 0 for layer in range(layers)),
            fields.integer("attention.sliding_window", 4096),
        ),
        query_scale=gguf_query_scale(fields, decoder, _LARGEST_LAYERS),
        embed_scale=embed_scale(decoder.hidden_size),
        post_norms=True,
        attention_softcap=fields.number("attn_logit_softcapping", 50.0),
        logit_softcap=fields.number("final_logit_softcapping", 30.0),
        activation="gelu_tanh",
    )


def build(graph: Graph, config: ModelConfig) -> None:
    """Record the operations."""
    blocks.decoder(graph, config, blocks.post_norm_layer)


def embed_scale(hidden_size: int) -> float:
    """The root of the width, rounded to float32 as the reference holds it."""
    return float(np.float32(hidden_size**0.5))


def gguf_query_scale(fields: Fields, decoder: ModelConfig, largest: int) -> float:
    """The score scale, which GGUF files rarely state: all sizes divide by the root of the head's
    width, but the largest, of so many layers, by that of the model's width per head.
    """
    scale = decoder.query_scale
    if decoder.num_layers == largest:
        scale = (decoder.hidden_size / decoder.num_heads) ** -0.5
    return fields.number("attention.scale", scale)


def refuse_bidirectional(fields: Fields) -> None:
    """Raise `UnsupportedModelError` for a model whose tokens look ahead."""
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModelError("use_bidirectional_attention is not supported")
