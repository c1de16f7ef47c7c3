"""Which checkpoints open as which model, and what is refused, by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MistralConfig,
    SiglipVisionConfig,
)

from steppe.errors import CheckpointError, ModelError, UnsupportedModelError
from steppe.formats.checkpoint import open_checkpoint
from steppe.models import gemma2, gemma3, mistral
from steppe.models.registry import ARCHITECTURES, Model, load_model
from tests.models.driver import Driver
from tests.models.numpy_backend import NumpyBackend
from tests.oracle.zoo import SIZES, VARIANTS, configuration, make, randomise, save

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from steppe.backends.base import Program
    from steppe.models.config import ModelConfig


def edit_config(directory: Path, **changes: Any) -> None:
    """Set fields of ``config.json``; ``...`` removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_tensors(
    directory: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
) -> None:
    path = directory / "model.safetensors"
    tensors = dict(change(dict(load_file(path))))
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})


def load(directory: Path) -> Model:
    return load_model(open_checkpoint(directory))


@pytest.fixture
def llama(tmp_path: Path, seed: int) -> Path:
    return save(make(VARIANTS["llama"], seed), tmp_path / "llama")


def test_a_model_is_a_program(llama: Path) -> None:
    model = load(llama)
    program: Program = model
    assert program.name == "llama"
    assert program.vocab_size == 83
    assert program.max_positions == 128
    assert len(program.layers) == 3
    assert set(program.weights) == set(open_checkpoint(llama).tensors)


def test_max_model_len(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    assert load_model(checkpoint, max_model_len=100).max_positions == 100
    for length in (0, -1, 129):
        with pytest.raises(ModelError, match=f"max_model_len: {length}"):
            load_model(checkpoint, max_model_len=length)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_family_alone_is_enough(name: str, tmp_path: Path, seed: int) -> None:
    save(make(VARIANTS[name], seed), tmp_path)
    named = load(tmp_path).config.architecture
    edit_config(tmp_path, architectures=...)
    assert load(tmp_path).config.architecture == named


def test_every_architecture_is_tried() -> None:
    tried = {configuration(variant).model_type for variant in VARIANTS.values()}
    known = {kind for architecture in ARCHITECTURES for kind in architecture.hf_types}
    assert tried == known - {"gemma3"}  # the multimodal one, below


UNKNOWN: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"architectures": ["LlamaForSequenceClassification"]}, UnsupportedModelError, "LlamaForSeq"),
    ({"architectures": ["MambaForCausalLM"]}, UnsupportedModelError, "Mamba.*Qwen3MoeForCausalLM"),
    ({"architectures": [], "model_type": "mamba"}, UnsupportedModelError, "mamba"),
    ({"architectures": ..., "model_type": ...}, CheckpointError, "neither"),
    ({"architectures": "LlamaForCausalLM"}, CheckpointError, "architectures"),
    ({"architectures": [3]}, CheckpointError, "architectures"),
    ({"model_type": "qwen2"}, CheckpointError, "model_type is 'qwen2'"),
]


@pytest.mark.parametrize(("changes", "error", "named"), UNKNOWN)
def test_unknown_architectures(
    changes: dict[str, Any], error: type[Exception], named: str, llama: Path
) -> None:
    edit_config(llama, **changes)
    with pytest.raises(error, match=named):
        load(llama)


WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("llama", {"hidden_size": ...}, CheckpointError, "hidden_size is missing"),
    ("llama", {"hidden_size": 0}, CheckpointError, "hidden_size"),
    ("llama", {"hidden_size": "36"}, CheckpointError, "hidden_size"),
    ("llama", {"hidden_size": True}, CheckpointError, "hidden_size"),
    ("llama", {"hidden_size": 40, "head_dim": None}, CheckpointError, "num_attention_heads"),
    ("llama", {"num_hidden_layers": 10**9}, CheckpointError, "num_hidden_layers"),
    ("llama", {"head_dim": 10**9}, CheckpointError, "head_dim"),
    ("llama", {"head_dim": 5}, CheckpointError, "head_dim"),
    ("llama", {"head_dim": 8}, CheckpointError, r"q_proj\.weight: shape \(36, 36\).*\(48, 36\)"),
    ("llama", {"vocab_size": 84}, CheckpointError, "embed_tokens.weight: shape"),
    ("llama", {"intermediate_size": 45}, CheckpointError, "gate_proj.*more parameters disagree"),
    ("llama", {"rms_norm_eps": float("nan")}, CheckpointError, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": 2}, CheckpointError, "rms_norm_eps"),
    ("llama", {"max_position_embeddings": 2**31}, CheckpointError, "max_position_embeddings"),
    ("llama", {"num_key_value_heads": 4}, CheckpointError, "num_kv_heads"),
    ("llama", {"hidden_act": "relu"}, UnsupportedModelError, "hidden_act 'relu'"),
    ("llama", {"attention_bias": True}, CheckpointError, "q_proj.bias"),
    ("llama", {"attention_bias": "yes"}, CheckpointError, "attention_bias"),
    ("llama", {"rope_scaling": [1]}, CheckpointError, "rope_scaling"),
    ("mistral", {"sliding_window": 0}, CheckpointError, "sliding_window"),
    ("qwen2-windowed", {"layer_types": ["full_attention"]}, CheckpointError, "layer_types"),
    (
        "qwen2-windowed",
        {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
        UnsupportedModelError,
        "chunked_attention",
    ),
    ("qwen2-windowed", {"sliding_window": None}, CheckpointError, "sliding_window"),
    ("qwen3-moe", {"num_experts_per_tok": 6}, CheckpointError, "experts.per_token"),
    ("qwen3-moe", {"num_local_experts": 6}, CheckpointError, r"experts\.5\.gate_proj"),
    ("qwen3-moe", {"num_local_experts": 4}, CheckpointError, "mlp.gate.weight: shape"),
    ("qwen3-moe", {"mlp_only_layers": "all"}, CheckpointError, "mlp_only_layers"),
    ("gemma2", {"use_bidirectional_attention": True}, UnsupportedModelError, "bidirectional"),
    ("gemma2", {"hidden_activation": "gelu"}, UnsupportedModelError, "hidden_activation 'gelu'"),
    ("gemma2", {"attn_logit_softcapping": -1}, CheckpointError, "attn_logit_softcapping"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, UnsupportedModelError, "attn_logit_softcapping"),
    ("gemma3", {"rope_parameters": {"rope_theta": 5.0}}, UnsupportedModelError, "rope_theta"),
]


@pytest.mark.parametrize(("name", "changes", "error", "named"), WRONG)
def test_what_a_configuration_gets_wrong_is_named(
    name: str,
    changes: dict[str, Any],
    error: type[Exception],
    named: str,
    tmp_path: Path,
    seed: int,
) -> None:
    directory = save(make(VARIANTS[name], seed), tmp_path)
    load(directory)
    edit_config(directory, **changes)
    with pytest.raises(error, match=named):
        load(directory)


def test_missing_and_unknown_tensors_are_listed(llama: Path) -> None:
    edit_tensors(llama, lambda t: {k: v for k, v in t.items() if ".1.mlp." not in k})
    with pytest.raises(CheckpointError, match=r"3 of \d+ .*layers\.1\.mlp\.gate_proj\.weight"):
        load(llama)


def test_tensors_nobody_reads_are_an_error(llama: Path) -> None:
    extra = {"model.layers.0.self_attn.q_norm.weight": torch.ones(6)}
    edit_tensors(llama, lambda t: t | extra)
    with pytest.raises(CheckpointError, match=r"q_norm\.weight"):
        load(llama)


def test_buffers_of_old_exports_are_not(llama: Path) -> None:
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    edit_tensors(llama, lambda t: t | buffers)
    assert load(llama).weights.keys() & buffers.keys() == set()


def test_tied_heads_are_one_object(tmp_path: Path, seed: int) -> None:
    reference = make(VARIANTS["qwen2"], seed)
    model = load(save(reference, tmp_path))
    table = model.weights["model.embed_tokens.weight"]
    assert model.weights["lm_head.weight"] is table

    # Some files hold the copy as well. One that differs is what transformers would use.
    edit_tensors(tmp_path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    weights = load(tmp_path).weights
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    edit_tensors(tmp_path, lambda t: t | {"lm_head.weight": 2 * t["lm_head.weight"]})
    weights = load(tmp_path).weights
    np.testing.assert_array_equal(weights["lm_head.weight"].dequantize(), 2 * table.dequantize())


def test_gemma_norms_are_stored_less_one(tmp_path: Path, seed: int) -> None:
    reference = make(VARIANTS["gemma3"], seed)
    model = load(save(reference, tmp_path))
    state = reference.state_dict()
    for name, weight in model.weights.items():
        expected = state[name].numpy() + (1 if name.endswith("norm.weight") else 0)
        np.testing.assert_array_equal(weight.dequantize(), expected, name)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_files(kind: torch.dtype, tmp_path: Path, seed: int) -> None:
    reference = make(VARIANTS["gemma2"], seed).to(kind)
    model = load(save(reference, tmp_path))
    state = reference.state_dict()
    for name, weight in model.weights.items():
        assert weight.dtype == {torch.bfloat16: "BF16", torch.float16: "F16"}[kind]
        expected = state[name].float().numpy() + (1 if name.endswith("norm.weight") else 0)
        np.testing.assert_array_equal(weight.dequantize(), expected, name)


def test_fused_experts(tmp_path: Path, seed: int) -> None:
    reference = make(VARIANTS["qwen3-moe"], seed)
    single = load(save(reference, tmp_path))
    fused = {k: v for k, v in reference.state_dict().items() if ".mlp.experts." in k}
    assert len(fused) == 2 * 3
    edit_tensors(
        tmp_path, lambda t: {k: v for k, v in t.items() if ".mlp.experts." not in k} | fused
    )
    model = load(tmp_path)
    for name, weight in single.weights.items():
        np.testing.assert_array_equal(model.weights[name].dequantize(), weight.dequantize(), name)

    cut = "model.layers.0.mlp.experts.down_proj"
    edit_tensors(tmp_path, lambda t: t | {cut: t[cut][:4]})
    with pytest.raises(CheckpointError, match=r"experts\.down_proj.*stack"):
        load(tmp_path)


OLD_FORMS: dict[str, dict[str, Any]] = {
    "llama-linear": {
        "rope_parameters": ...,
        "rope_theta": 900.0,
        "rope_scaling": {"type": "linear", "factor": 2.5},
    },
    "llama-yarn": {
        "rope_parameters": ...,
        "rope_theta": 1000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3-moe": {"num_local_experts": ..., "num_experts": 5},
    "gemma2": {"layer_types": ..., "rope_parameters": ..., "rope_theta": 10_000.0},
    "gemma3": {
        "layer_types": ...,
        "sliding_window_pattern": 6,
        "rope_parameters": ...,
        "rope_theta": 5000.0,
        "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
}


@pytest.mark.parametrize("name", OLD_FORMS)
def test_older_configurations(name: str, tmp_path: Path, seed: int) -> None:
    save(make(VARIANTS[name], seed), tmp_path)
    today = load(tmp_path).config
    edit_config(tmp_path, **OLD_FORMS[name])
    older = load(tmp_path).config
    for mine, theirs in zip(older.ropes, today.ropes, strict=True):
        np.testing.assert_array_equal(mine.inv_freq, theirs.inv_freq)
        assert mine.scale == theirs.scale
    assert repr(older) == repr(today)  # the ropes are not in it


def test_the_text_model_of_a_multimodal_gemma(
    tmp_path: Path, seed: int, rng: np.random.Generator
) -> None:
    text = configuration(VARIANTS["gemma3"])
    text.final_logit_softcapping = None  # which the multimodal class does not apply
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    reference = Gemma3ForConditionalGeneration(config).eval()
    randomise(reference, seed)
    model = load(save(reference, tmp_path))

    tokens = rng.integers(0, SIZES["vocab_size"], 20)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)[None]).logits[0].numpy()
    driver = Driver(NumpyBackend(), model, rng, sequences=1, tokens=20)
    ours = driver.step({0: tokens}, all_logits=True).logits
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)

    # Tensors are nested the other way round in files written before transformers 5.
    def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name.replace("model.language_model.", "language_model.model.").replace(
                "model.vision_tower.", "vision_tower."
            ): tensor
            for name, tensor in tensors.items()
        }

    edit_tensors(tmp_path, renamed)
    older = load(tmp_path)
    for name, weight in model.weights.items():
        np.testing.assert_array_equal(older.weights[name].dequantize(), weight.dequantize())
    edit_tensors(tmp_path, lambda t: t | {"audio_tower.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"audio_tower\.weight"):
        load(tmp_path)


def test_a_configuration_describes_each_layer(llama: Path) -> None:
    config: ModelConfig = load(llama).config
    for field, value in (
        ("windows", (None,)),
        ("windows", (0, None, None)),
        ("ropes", config.ropes[:1]),
        ("num_layers", 0),
        ("query_scale", 0.0),
        ("attention_softcap", float("nan")),
    ):
        with pytest.raises(CheckpointError, match=field):
            replace(config, **{field: value})


def test_a_multimodal_configuration_leaves_out_defaults() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = gemma3.from_hf({"model_type": "gemma3", "text_config": text})
    theirs = Gemma3Config(text_config=text).text_config
    assert config.vocab_size == theirs.vocab_size
    assert config.num_heads == theirs.num_attention_heads
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == theirs.head_dim
    assert config.max_positions == theirs.max_position_embeddings
    assert config.tie_word_embeddings
    local = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert config.windows == tuple(1024 if is_local else None for is_local in local)
    assert config.ropes[5].inv_freq[0] == 0.125
    assert config.ropes[0].inv_freq[0] == 1.0


@pytest.mark.parametrize(
    ("read", "config_class"), [(mistral.from_hf, MistralConfig), (gemma2.from_hf, Gemma2Config)]
)
def test_absent_fields_are_not_null(read: Any, config_class: Any) -> None:
    full = config_class(**SIZES).to_dict()
    for value, expected in ((4096, 4096), (7, 7)):
        assert read(full | {"sliding_window": value}).windows[0] == expected
    assert read({k: v for k, v in full.items() if k != "sliding_window"}).windows[0] == 4096
    null = {"sliding_window": None, "layer_types": ["full_attention"] * 3}
    assert read(full | null).windows == (None,) * 3
