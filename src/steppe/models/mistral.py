"""Mistral: Llama with a sliding window in every layer.

In GGUF files it calls itself ``llama``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from steppe.models import blocks
from steppe.models.fields import Fields
from steppe.models.reading import hf_decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from steppe.backends.tape import Graph
    from steppe.models.config import ModelConfig

__all__ = ["NAME", "build", "from_hf"]

NAME: Final = "mistral"


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a ``config.json``. A null ``sliding_window`` means full attention, an absent one
    4096."""
    decoder = hf_decoder(config, NAME)
    window = Fields(config).optional_integer("sliding_window", 4096)
    return replace(decoder, windows=(window,) * decoder.num_layers)


def build(graph: Graph, config: ModelConfig) -> None:
    """Record the operations."""
    blocks.decoder(graph, config, blocks.pre_norm_layer)
