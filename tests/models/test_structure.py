"""What is recorded, without running it: operations, their order, cache groups and outputs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from steppe.backends.tape import (
    Add,
    CacheSpec,
    Embed,
    GatedActivation,
    Graph,
    Linear,
    MixtureOfExperts,
    PagedAttention,
    RmsNorm,
    RopeWriteKV,
    Softcap,
    TakeRows,
    Tape,
)
from steppe.formats.checkpoint import open_checkpoint
from steppe.models.registry import Model, load_model
from steppe.models.weights import parameter_shapes
from tests.oracle.zoo import VARIANTS, make, save

if TYPE_CHECKING:
    from pathlib import Path


def trace(model: Model) -> Tape:
    graph = Graph(model.layers)
    model.build(graph)
    return graph.tape()


def load(name: str, path: Path) -> Model:
    return load_model(open_checkpoint(save(make(VARIANTS[name], 0), path)))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_program_names_its_outputs_and_uses_each_layer_once(
    name: str, tmp_path: Path
) -> None:
    model = load(name, tmp_path)
    tape = trace(model)
    layers = list(range(model.config.num_layers))
    hidden = {f"hidden[{i}]" for i in range(len(layers) + 1)}
    assert set(tape.outputs) == hidden | {"final_hidden", "logits"}
    assert [op.layer for op in tape.ops if isinstance(op, RopeWriteKV)] == layers
    assert [op.layer for op in tape.ops if isinstance(op, PagedAttention)] == layers
    assert tape.widths[tape.outputs["logits"]] == model.vocab_size
    # Nothing but the head depends on which rows somebody wants logits of.
    (rows,) = (at for at, op in enumerate(tape.ops) if isinstance(op, TakeRows))
    assert {type(op).__name__ for op in tape.ops[rows + 1 :]} <= {"Linear", "Softcap", "Output"}
    shapes = parameter_shapes(tape, model.vocab_size)
    assert {name: weight.shape for name, weight in model.weights.items()} == shapes


def test_a_llama_layer(tmp_path: Path) -> None:
    tape = trace(load("llama-biased-tied", tmp_path))
    kinds = Counter(type(op) for op in tape.ops)
    assert kinds[RmsNorm] == 2 * 3 + 1
    assert kinds[Linear] == 7 * 3 + 1
    assert kinds[Add] == 2 * 3
    assert kinds[GatedActivation] == kinds[RopeWriteKV] == 3
    biased = {op.site for op in tape.ops if isinstance(op, Linear) and op.bias}
    assert len(biased) == 7 * 3
    (embed,) = (op for op in tape.ops if isinstance(op, Embed))
    assert (embed.weight, embed.scale) == ("model.embed_tokens.weight", 1.0)
    assert {op.scale for op in tape.ops if isinstance(op, PagedAttention)} == {10**-0.5}


def test_qwen_biases_leave_out_the_output(tmp_path: Path) -> None:
    tape = trace(load("qwen2", tmp_path))
    biased = {op.site.split(".")[-1] for op in tape.ops if isinstance(op, Linear) and op.bias}
    assert biased == {"q_proj", "k_proj", "v_proj"}


def test_qk_norms_are_per_head(tmp_path: Path) -> None:
    tape = trace(load("qwen3", tmp_path))
    norms = [op for op in tape.ops if isinstance(op, RmsNorm)]
    assert {op.heads for op in norms if "q_norm" in op.weight} == {6}
    assert {op.heads for op in norms if "k_norm" in op.weight} == {2}
    assert {op.heads for op in norms if "layernorm" in op.weight} == {1}


def test_experts_are_where_they_belong(tmp_path: Path) -> None:
    tape = trace(load("qwen3-moe-mixed", tmp_path))
    routed = [op for op in tape.ops if isinstance(op, MixtureOfExperts)]
    assert [op.site for op in routed] == ["model.layers.0.mlp", "model.layers.2.mlp"]
    assert {(op.num_experts, op.top_k, op.normalize) for op in routed} == {(5, 3, False)}
    assert sum(isinstance(op, GatedActivation) for op in tape.ops) == 1


def test_gemma2_alternates_and_caps(tmp_path: Path) -> None:
    tape = trace(load("gemma2", tmp_path))
    assert [spec.window for spec in tape.layers] == [6, None, 6]
    assert [(group.spec, group.layers) for group in tape.groups] == [
        (CacheSpec(2, 10, 6), (0, 2)),
        (CacheSpec(2, 10, None), (1,)),
    ]
    attention = [op for op in tape.ops if isinstance(op, PagedAttention)]
    assert {(op.softcap, op.scale) for op in attention} == {(2.0, 7**-0.5)}
    assert [op.cap for op in tape.ops if isinstance(op, Softcap)] == [4.0]
    (embed,) = (op for op in tape.ops if isinstance(op, Embed))
    assert embed.scale == 6.0


def test_gemma3_layers_share_a_rope_by_kind(tmp_path: Path) -> None:
    tape = trace(load("gemma3", tmp_path))
    assert [group.layers for group in tape.groups] == [(0, 1, 2, 3, 4, 6), (5,)]
    ropes = [op.rope for op in tape.ops if isinstance(op, RopeWriteKV)]
    assert len({id(rope) for rope in ropes}) == 2
    assert ropes[5].inv_freq[0] == pytest.approx(1 / 3)
    assert ropes[6].inv_freq[0] == 1.0


def test_windows_of_other_families(tmp_path: Path) -> None:
    expected = {
        "mistral": [7, 7, 7],
        "mistral-full": [None, None, None],
        "qwen2": [None, None, None],
        "qwen2-windowed": [None, 9, 9],
        "qwen3-biased-windowed": [5, None, 5],
        "qwen3-moe-mixed": [6, 6, 6],
        "gemma3-alternating": [None, 11, None],
    }
    for name, windows in expected.items():
        model = load(name, tmp_path / name)
        assert [spec.window for spec in model.layers] == windows, name
