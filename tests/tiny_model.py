"""A whole tiny model directory: random Llama weights, a byte tokenizer, a chat template.

Written by hand, so that tests of everything above the model need neither `transformers` nor a
download. Its answers are noise, but they are always the same noise for one seed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from tests.runtime.fakes import EOS, IM_END, IM_START, TEMPLATE, VOCAB, byte_core

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN = 32
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
WIDE = 48
CONTEXT = 256


def write_tiny_model(
    folder: Path, seed: int = 0, *, window: int | None = None, **generation: object
) -> Path:
    """Write the model; ``generation`` becomes its generation_config.

    With ``window`` it is a Qwen 2 whose second layer sees no further than that: two cache groups.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": weight(VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            layer + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            layer + "self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
            layer + "mlp.gate_proj.weight": weight(WIDE, HIDDEN),
            layer + "mlp.up_proj.weight": weight(WIDE, HIDDEN),
            layer + "mlp.down_proj.weight": weight(HIDDEN, WIDE),
        }
    windows: dict[str, object] = {}
    if window is not None:
        for i in range(LAYERS):
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                bias = weight(heads * HEAD_DIM)
                tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"] = bias
        windows = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": LAYERS - 1,
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": WIDE,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        **windows,
    }
    byte_core().save(str(folder / "tokenizer.json"))
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [EOS, IM_END], **generation},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "chat_template": TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert IM_START < VOCAB
    return folder
