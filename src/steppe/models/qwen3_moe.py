"""Qwen 3 with routed experts in the feed-forward blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from steppe.models import blocks
from steppe.models.config import ExpertsConfig
from steppe.models.fields import Fields
from steppe.models.reading import gguf_decoder, hf_decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from steppe.backends.tape import Graph
    from steppe.models.config import ModelConfig
    from steppe.models.reading import Tensors

__all__ = ["NAME", "build", "from_gguf", "from_hf"]

NAME: Final = "qwen3-moe"
GGUF_NAME: Final = "qwen3moe"


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a ``config.json``. A window, where it is used, holds in all layers."""
    fields = Fields(config)
    decoder = hf_decoder(config, NAME)
    used = fields.flag("use_sliding_window", False)
    window = fields.optional_integer("sliding_window", 4096) if used else None
    bias = fields.flag("attention_bias", False)
    return replace(
        decoder,
        windows=(window,) * decoder.num_layers,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        experts=_hf_experts(fields, decoder.num_layers),
    )


def from_gguf(metadata: Mapping[str, Any], tensors: Tensors) -> ModelConfig:
    """Read GGUF metadata: every layer is routed, the weights are renormalised unless it is said
    that they are not.
    """
    decoder = gguf_decoder(metadata, tensors, NAME, gguf_architecture=GGUF_NAME, experts=True)
    fields = Fields(metadata, f"{GGUF_NAME}.")
    return replace(
        decoder,
        qk_norm=True,
        experts=ExpertsConfig(
            count=fields.integer("expert_count"),
            per_token=fields.integer("expert_used_count"),
            width=fields.integer("expert_feed_forward_length"),
            normalize=fields.flag("expert_weights_norm", True),
            layers=frozenset(range(decoder.num_layers)),
        ),
    )


def build(graph: Graph, config: ModelConfig) -> None:
    """Record the operations."""
    blocks.decoder(graph, config, blocks.pre_norm_layer)


def _hf_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    # The name of the count has changed over time.
    name = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.error("mlp_only_layers", "is no list of layers", dense)
    routed = frozenset(
        layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0
    )
    return ExpertsConfig(
        count=fields.integer(name, 128),
        per_token=fields.integer("num_experts_per_tok", 8),
        width=fields.integer("moe_intermediate_size", 768),
        normalize=fields.flag("norm_topk_prob", False),
        layers=routed,
    )
