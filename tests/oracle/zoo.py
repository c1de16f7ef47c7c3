"""Tiny random checkpoints of every architecture, made with transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from pathlib import Path

# No two sizes are equal and none is a power of two, so that a mixed-up one cannot go unnoticed.
SIZES: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Variant:
    """A transformers class prefix and what its configuration says beyond `SIZES`."""

    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    model_class: str = "ForCausalLM"


VARIANTS: dict[str, Variant] = {
    "llama": Variant("Llama"),
    "llama-biased-tied": Variant(
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 10},
    ),
    "llama-linear": Variant(
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 900.0, "factor": 2.5}},
    ),
    "llama-llama3": Variant(
        "Llama",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-yarn": Variant(
        "Llama",
        {
            "head_dim": 14,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral": Variant("Mistral", {"sliding_window": 7}),
    "mistral-full": Variant("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": Variant("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windowed": Variant(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    ),
    "qwen3": Variant("Qwen3", {"head_dim": 10}),
    "qwen3-biased-windowed": Variant(
        "Qwen3",
        {
            "head_dim": 14,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe": Variant(
        "Qwen3Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 22,
            "norm_topk_prob": True,
            "head_dim": 10,
        },
    ),
    "qwen3-moe-mixed": Variant(
        "Qwen3Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 22,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
    "gemma2": Variant(
        "Gemma2",
        {
            "head_dim": 10,
            "sliding_window": 6,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma2-uncapped": Variant(
        "Gemma2",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "gemma3": Variant(
        "Gemma3",
        {
            "head_dim": 10,
            "num_hidden_layers": 7,
            "sliding_window": 6,
            "query_pre_attn_scalar": 12,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "rope_theta": 5000.0,
                    "factor": 3.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3-alternating": Variant(
        "Gemma3",
        {
            "head_dim": 12,
            "sliding_window": 11,
            "query_pre_attn_scalar": 12,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}


def configuration(variant: Variant) -> Any:
    """The transformers configuration of a variant."""
    name = "Gemma3Text" if variant.family == "Gemma3" else variant.family
    return getattr(transformers, f"{name}Config")(**(SIZES | variant.fields))


def make(variant: Variant, seed: int) -> PreTrainedModel:
    """A model with weights large enough that every part of it matters to the logits."""
    config = configuration(variant)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model_class = getattr(transformers, variant.family + variant.model_class)
    model: PreTrainedModel = model_class(config).eval()
    randomise(model, seed)
    return model


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Fresh weights: norms around their neutral value, matrices that keep the scale."""
    generator = torch.Generator().manual_seed(seed)
    neutral = 0.0 if type(model).__name__.startswith("Gemma") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(neutral + 0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.4 * noise / parameter.shape[-1] ** 0.5)


def save(model: PreTrainedModel, directory: Path) -> Path:
    """Write a checkpoint the way transformers does."""
    model.save_pretrained(directory)
    return directory
