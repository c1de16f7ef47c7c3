"""Llama, and what has its shape (SmolLM, and Mistral in GGUF files)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from steppe.models import blocks
from steppe.models.fields import Fields
from steppe.models.reading import gguf_decoder, hf_decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from steppe.backends.tape import Graph
    from steppe.models.config import ModelConfig
    from steppe.models.reading import Tensors

__all__ = ["NAME", "build", "from_gguf", "from_hf"]

NAME: Final = "llama"


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a ``config.json``."""
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    return replace(
        hf_decoder(config, NAME),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def from_gguf(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    """Read GGUF metadata. Converters store query and key rows in rotated pairs.

    A sliding window, if there is one (Mistral's), holds in all layers.
    """
    decoder = gguf_decoder(metadata, tensors, NAME, window=True)
    window = Fields(metadata, f"{NAME}.").optional_integer("attention.sliding_window")
    return replace(decoder, windows=(window,) * decoder.num_layers, interleaved_rope=True)


def build(graph: Graph, config: ModelConfig) -> None:
    """Record the operations."""
    blocks.decoder(graph, config, blocks.pre_norm_layer)
