"""The same model from both file formats: parameters, configuration and logits agree."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from steppe.errors import CheckpointError, UnsupportedModelError
from steppe.formats.checkpoint import open_checkpoint
from steppe.models.registry import Model, load_model
from tests.models.driver import Driver
from tests.models.gguf_files import write_gguf
from tests.models.numpy_backend import NumpyBackend
from tests.oracle.zoo import VARIANTS, Variant, configuration, make, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

EXPERTS = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 22}
METADATA: dict[str, dict[str, Any]] = {
    "llama": {"rope.freq_base": 10000.0},
    "llama-biased-tied": {},
    "llama-linear": {
        "rope.freq_base": 900.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 2.5,
    },
    "llama-yarn": {
        "rope.freq_base": 1000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    },
    "mistral": {"attention.sliding_window": 7},
    # Without its own key, a head's width is the model's divided by the heads.
    "mistral-full": {"attention.key_length": 8, "attention.value_length": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3-moe": EXPERTS,
    "gemma2": {
        "attention.sliding_window": 6,
        "attention.scale": 7**-0.5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3": {
        "attention.sliding_window": 6,
        "attention.scale": 12**-0.5,
        "final_logit_softcapping": 5.0,
        "rope.freq_base": 5000.0,
        "rope.freq_base_swa": 300.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 3.0,
    },
}
# How the files differ, and the name of what is called otherwise.
FORMAT_FIELDS = {"name", "architecture", "norm_offset", "interleaved_rope", "ropes"}


def pair(variant: Variant, path: Path, seed: int, **gguf_options: Any) -> tuple[Model, Model]:
    """A tiny random model as a Hugging Face directory and as a GGUF file."""
    reference = make(variant, seed)
    theirs = load_model(open_checkpoint(save(reference, path / "hf")))
    ours = load_model(open_checkpoint(write_gguf(reference, path / "x.gguf", **gguf_options)))
    return theirs, ours


def logits(model: Model, tokens: NDArray[np.int64], rng: np.random.Generator) -> Any:
    driver = Driver(NumpyBackend(), model, rng, sequences=1, tokens=len(tokens))
    return driver.step({0: tokens}, all_logits=True).logits


@pytest.mark.parametrize("name", METADATA)
def test_unquantised_files_are_the_same_model(
    name: str, tmp_path: Path, seed: int, rng: np.random.Generator
) -> None:
    hf, ours = pair(VARIANTS[name], tmp_path, seed, metadata=METADATA[name])

    for field in fields(hf.config):
        if field.name not in FORMAT_FIELDS:
            expected, value = getattr(hf.config, field.name), getattr(ours.config, field.name)
            if isinstance(expected, float):
                assert value == pytest.approx(expected, rel=1e-6), field.name
            else:
                assert value == expected, field.name
    for mine, theirs in zip(ours.config.ropes, hf.config.ropes, strict=True):
        np.testing.assert_allclose(mine.inv_freq, theirs.inv_freq, rtol=1e-6)
        assert mine.scale == pytest.approx(theirs.scale, rel=1e-6)
    assert set(ours.weights) == set(hf.weights)
    for key, weight in hf.weights.items():
        np.testing.assert_array_equal(ours.weights[key].dequantize(), weight.dequantize(), key)
    tokens = rng.integers(0, hf.vocab_size, 24)
    np.testing.assert_allclose(
        logits(ours, tokens, rng), logits(hf, tokens, rng), rtol=0, atol=1e-5
    )


# Blocks are 32 wide: every matrix of these has rows of whole blocks.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma3"])
def test_quantised_parameters(name: str, kind: str, tmp_path: Path, seed: int) -> None:
    variant = VARIANTS[name]
    wide = Variant(variant.family, variant.fields | WIDE | {"moe_intermediate_size": 32})
    metadata = METADATA[name] | ({"expert_feed_forward_length": 32} if "moe" in name else {})
    hf, ours = pair(wide, tmp_path, seed, metadata=metadata, matrices=kind)
    quantised = gguf.GGMLQuantizationType[kind]
    for key, weight in hf.weights.items():
        exact = weight.dequantize()
        if exact.ndim == 2:
            exact = gguf.dequantize(gguf.quantize(exact, quantised), quantised)
            assert ours.weights[key].dtype == kind
        np.testing.assert_array_equal(ours.weights[key].dequantize(), exact, key)


def test_experts_are_views_of_their_stack(tmp_path: Path, seed: int) -> None:
    _, ours = pair(VARIANTS["qwen3-moe"], tmp_path, seed, metadata=EXPERTS)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    model = load_model(checkpoint)
    stack = checkpoint.tensors["blk.1.ffn_up_exps.weight"]
    for expert in range(5):
        weight = model.weights[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        assert np.shares_memory(weight.data, stack.data)
        np.testing.assert_array_equal(weight.dequantize(), stack.dequantize()[expert])
    assert ours.config.experts is not None


def test_llama3_divisors(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    variant = VARIANTS["llama-llama3"]
    config = configuration(variant)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 1.0 / 500.0 ** (torch.arange(0, 16, 2) / 16)
    hf, ours = pair(
        variant,
        tmp_path,
        seed,
        metadata={"rope.freq_base": 500.0},
        tensors={"rope_freqs.weight": (plain / scaled).numpy()},
    )
    tokens = rng.integers(0, hf.vocab_size, 24)
    np.testing.assert_allclose(
        logits(ours, tokens, rng), logits(hf, tokens, rng), rtol=0, atol=1e-5
    )


def test_the_largest_gemmas_scale_by_their_own_rule(tmp_path: Path) -> None:
    for name, layers in (("gemma2", 46), ("gemma3", 62)):
        fields = VARIANTS[name].fields | {"num_hidden_layers": layers, "hidden_size": 24}
        reference = make(Variant(VARIANTS[name].family, fields), 0)
        metadata = {"attention.sliding_window": 6}
        path = write_gguf(reference, tmp_path / f"{name}.gguf", metadata=metadata)
        assert load_model(open_checkpoint(path)).config.query_scale == (24 / 6) ** -0.5


def test_defaults_of_gemma_files(tmp_path: Path) -> None:
    gemma2 = make(VARIANTS["gemma2"], 0)
    config = load_model(open_checkpoint(write_gguf(gemma2, tmp_path / "2.gguf"))).config
    assert config.windows == (4096, None, 4096)
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert config.query_scale == 10**-0.5

    gemma3 = make(VARIANTS["gemma3"], 0)
    path = write_gguf(gemma3, tmp_path / "3.gguf", metadata={"attention.sliding_window": 6})
    config = load_model(open_checkpoint(path)).config
    assert config.windows == (6, 6, 6, 6, 6, None, 6)
    assert config.logit_softcap is None
    assert config.ropes[5].inv_freq[1] == pytest.approx(1e6**-0.2)
    assert config.ropes[0].inv_freq[1] == pytest.approx(1e4**-0.2)


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("llama", {"expert_count": 8}, UnsupportedModelError, "llama.expert_count"),
    ("llama", {"rope.dimension_count": 4}, UnsupportedModelError, "llama.rope.dimension_count"),
    ("llama", {"rope.scaling.type": "longrope"}, UnsupportedModelError, "longrope"),
    ("llama", {"attention.value_length": 8}, UnsupportedModelError, "value_length"),
    ("qwen2", {"attention.sliding_window": 8}, UnsupportedModelError, "sliding_window"),
    ("llama", {"block_count": 0}, CheckpointError, "llama.block_count"),
    ("llama", {"block_count": 2**31}, CheckpointError, "llama.block_count"),
    ("llama", {"block_count": 4}, CheckpointError, "model.layers.3"),
    ("llama", {"block_count": 2}, CheckpointError, "blk.2.attn_norm.weight"),
    ("llama", {"attention.head_count": "six"}, CheckpointError, "attention.head_count"),
    ("llama", {"attention.head_count_kv": 4}, CheckpointError, "num_kv_heads"),
    ("llama", {"attention.head_count_kv": 3}, CheckpointError, "k_proj.weight: shape"),
    ("llama", {"attention.key_length": 2**30}, CheckpointError, "attention.key_length"),
    ("llama", {"attention.layer_norm_rms_epsilon": None}, CheckpointError, "epsilon is missing"),
    ("llama", {"feed_forward_length": 43}, CheckpointError, "gate_proj.weight: shape"),
    ("llama", {"rope.freq_base": -1.0}, CheckpointError, "llama.rope.freq_base"),
    ("llama", {"rope.freq_base": float("nan")}, CheckpointError, "llama.rope.freq_base"),
    ("qwen3-moe", EXPERTS | {"expert_count": 4}, CheckpointError, "not a stack of 4 experts"),
    ("qwen3-moe", EXPERTS | {"expert_used_count": 6}, CheckpointError, "experts.per_token"),
    ("qwen3-moe", EXPERTS | {"expert_count": 2**31 - 1}, CheckpointError, "experts.count"),
    ("gemma3", {"attention.sliding_window": None}, CheckpointError, "attention.sliding_window"),
]


@pytest.mark.parametrize(("name", "metadata", "error", "named"), REFUSED)
def test_what_a_file_gets_wrong_is_named(
    name: str,
    metadata: dict[str, Any],
    error: type[Exception],
    named: str,
    tmp_path: Path,
    seed: int,
) -> None:
    path = write_gguf(make(VARIANTS[name], seed), tmp_path / "x.gguf", metadata=metadata)
    with pytest.raises(error, match=named.replace(".", r"\.")):
        load_model(open_checkpoint(path))


def test_a_divisor_that_is_zero_is_refused(tmp_path: Path, seed: int) -> None:
    reference = make(VARIANTS["llama"], seed)
    write: Callable[..., Path] = write_gguf
    for values, named in (([0, 1, 1], "finite and positive"), ([1, 1], "shape")):
        path = write(
            reference,
            tmp_path / "x.gguf",
            tensors={"rope_freqs.weight": np.array(values, np.float32)},
        )
        with pytest.raises(CheckpointError, match=named):
            load_model(open_checkpoint(path))
