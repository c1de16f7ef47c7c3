"""The blocks that architectures are made of, as operations of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from steppe.models.config import ModelConfig

if TYPE_CHECKING:
    from steppe.backends.tape import Graph, Value

__all__ = ["attention", "decoder", "feed_forward", "post_norm_layer", "pre_norm_layer"]

Layer = Callable[["Graph", "Value", ModelConfig, int], "Value"]


def decoder(graph: Graph, config: ModelConfig, layer: Layer) -> None:
    """Embeddings, the layers, the last norm and the head, with every output named."""
    x = graph.embed("model.embed_tokens.weight", config.hidden_size, config.embed_scale)
    for index in range(config.num_layers):
        graph.output(f"hidden[{index}]", x)
        x = layer(graph, x, config, index)
    graph.output(f"hidden[{config.num_layers}]", x)
    x = graph.rms_norm(x, "model.norm.weight", config.rms_norm_eps)
    graph.output("final_hidden", x)
    logits = graph.linear(graph.take_rows(x), "lm_head", config.vocab_size)
    if config.logit_softcap is not None:
        logits = graph.softcap(logits, config.logit_softcap)
    graph.output("logits", logits)


def pre_norm_layer(graph: Graph, x: Value, config: ModelConfig, layer: int) -> Value:
    """Both blocks see a normalised input and add their output to what they were given."""
    site = f"model.layers.{layer}"
    eps = config.rms_norm_eps
    y = graph.rms_norm(x, f"{site}.input_layernorm.weight", eps)
    x = graph.add(x, attention(graph, y, config, layer))
    y = graph.rms_norm(x, f"{site}.post_attention_layernorm.weight", eps)
    return graph.add(x, feed_forward(graph, y, config, layer))


def post_norm_layer(graph: Graph, x: Value, config: ModelConfig, layer: int) -> Value:
    """As `pre_norm_layer`, with the blocks' outputs normalised too before they are added."""
    site = f"model.layers.{layer}"
    eps = config.rms_norm_eps
    y = graph.rms_norm(x, f"{site}.input_layernorm.weight", eps)
    y = attention(graph, y, config, layer)
    x = graph.add(x, graph.rms_norm(y, f"{site}.post_attention_layernorm.weight", eps))
    y = graph.rms_norm(x, f"{site}.pre_feedforward_layernorm.weight", eps)
    y = feed_forward(graph, y, config, layer)
    return graph.add(x, graph.rms_norm(y, f"{site}.post_feedforward_layernorm.weight", eps))


def attention(graph: Graph, x: Value, config: ModelConfig, layer: int) -> Value:
    """Projections, the heads' norms if there are any, rotation, attention over the cache."""
    site = f"model.layers.{layer}.self_attn"
    eps = config.rms_norm_eps
    q = graph.linear(x, f"{site}.q_proj", config.query_width, config.qkv_bias)
    k = graph.linear(x, f"{site}.k_proj", config.kv_width, config.qkv_bias)
    v = graph.linear(x, f"{site}.v_proj", config.kv_width, config.qkv_bias)
    if config.qk_norm:
        q = graph.rms_norm(q, f"{site}.q_norm.weight", eps, config.num_heads)
        k = graph.rms_norm(k, f"{site}.k_norm.weight", eps, config.num_kv_heads)
    q = graph.rope_write_kv(q, k, v, layer, config.ropes[layer])
    y = graph.paged_attention(
        q, layer, config.num_heads, config.query_scale, config.attention_softcap
    )
    return graph.linear(y, f"{site}.o_proj", config.hidden_size, config.output_bias)


def feed_forward(graph: Graph, x: Value, config: ModelConfig, layer: int) -> Value:
    """A gated block, or a routed one where the configuration says so."""
    site = f"model.layers.{layer}.mlp"
    if config.experts is not None and layer in config.experts.layers:
        return graph.mixture_of_experts(
            x,
            site,
            num_experts=config.experts.count,
            top_k=config.experts.per_token,
            expert_width=config.experts.width,
            normalize=config.experts.normalize,
            activation=config.activation,
        )
    gate = graph.linear(x, f"{site}.gate_proj", config.intermediate_size, config.mlp_bias)
    up = graph.linear(x, f"{site}.up_proj", config.intermediate_size, config.mlp_bias)
    y = graph.gated_activation(gate, up, config.activation)
    return graph.linear(y, f"{site}.down_proj", config.hidden_size, config.mlp_bias)
