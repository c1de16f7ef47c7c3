"""Qwen 2 and 2.5: biases on queries, keys and values; optional windows in the upper layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from steppe.models import blocks
from steppe.models.reading import gguf_decoder, hf_decoder, qwen_windows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from steppe.backends.tape import Graph
    from steppe.models.config import ModelConfig
    from steppe.models.reading import Tensors

__all__ = ["NAME", "build", "from_gguf", "from_hf"]

NAME: Final = "qwen2"


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a ``config.json``."""
    decoder = hf_decoder(config, NAME)
    return replace(decoder, windows=qwen_windows(config, decoder.num_layers), qkv_bias=True)


def from_gguf(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    """Read GGUF metadata."""
    return replace(gguf_decoder(metadata, tensors, NAME), qkv_bias=True)


def build(graph: Graph, config: ModelConfig) -> None:
    """Record the operations."""
    blocks.decoder(graph, config, blocks.pre_norm_layer)
