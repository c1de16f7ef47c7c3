"""Which parameters are quantised, to what, and what that does to the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from steppe import LLM, SamplingParams
from steppe.backends.torch import TorchBackend
from steppe.errors import ConfigError, UnsupportedModelError
from steppe.formats.checkpoint import open_checkpoint
from steppe.models.quantize import QUANTIZE, QuantizedWeight, quantized
from steppe.models.registry import load_model
from steppe.runtime.building import build_engine
from tests.models.driver import Driver
from tests.models.gguf_files import write_gguf
from tests.native.built import NativeBackend
from tests.oracle.zoo import VARIANTS, Variant, make, save
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from steppe.models.registry import Model

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def wide(name: str, path: Path, seed: int) -> Model:
    variant = VARIANTS[name]
    fields = variant.fields | WIDE | {"moe_intermediate_size": 32}
    return load_model(open_checkpoint(save(make(Variant(variant.family, fields), seed), path)))


def test_which_parameters_become_what(tmp_path: Path, seed: int) -> None:
    model = wide("qwen3-moe", tmp_path, seed)
    for how, inner in (("q8", "Q8_0"), ("q4", "Q4_1")):
        for name, weight in quantized(model, how).weights.items():
            if len(weight.shape) == 1 or name.endswith(".mlp.gate.weight"):
                assert weight is model.weights[name]
            elif name in ("model.embed_tokens.weight", "lm_head.weight"):
                assert weight.dtype == "Q8_0", name
            else:
                assert weight.dtype == inner, name
                assert weight.shape == model.weights[name].shape
    tied = wide("qwen2", tmp_path / "tied", seed)
    weights = quantized(tied, "q4").weights
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]


def test_rows_that_are_no_whole_groups_stay(tmp_path: Path) -> None:
    model = load_model(open_checkpoint(write_tiny_model(tmp_path / "tiny")))
    kinds = {name: weight.dtype for name, weight in quantized(model, "q4").weights.items()}
    assert kinds["model.layers.0.mlp.down_proj.weight"] == "F32"  # 48 wide
    assert kinds["model.layers.0.mlp.up_proj.weight"] == "Q4_1"


def logits(backend: Any, model: Model, rng: np.random.Generator) -> np.ndarray:
    driver = Driver(backend, model, np.random.default_rng(0), sequences=1, tokens=64)
    out = driver.step({0: rng.integers(0, model.vocab_size, 50)}, all_logits=True).logits
    return out.astype(np.float64)


def surprise(logits: np.ndarray, of: np.ndarray) -> float:
    """Mean cross entropy of the rows' distributions against those of ``of``, in nats."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    return float(-(np.exp(log_softmax(of)) * log_softmax(logits)).sum(axis=1).mean())


def apart(rows: np.ndarray, of: np.ndarray) -> float:
    """Relative error of the middle row."""
    return float(np.median(np.linalg.norm(rows - of, axis=1) / np.linalg.norm(of, axis=1)))


# Relative error of logits, and nats of divergence per token. These weights are random and large,
# so that layers amplify what quantisation does.
BOUNDS = {"q8": (0.12, 0.02), "q4": (0.7, 0.5)}


@pytest.mark.parametrize("how", QUANTIZE)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_logits_stay_near_the_unquantised_model_s(
    tmp_path: Path, seed: int, name: str, how: str
) -> None:
    model = wide(name, tmp_path, seed)
    exact = logits(TorchBackend(), model, np.random.default_rng(1))
    reference = logits(TorchBackend(), quantized(model, how), np.random.default_rng(1))
    ours = logits(NativeBackend(threads=2), quantized(model, how), np.random.default_rng(1))
    far, nats = BOUNDS[how]
    for rows in (reference, ours):
        assert apart(rows, exact) < far
        assert surprise(rows, exact) - surprise(exact, exact) < nats
    # Both hold the same quantised weights; the native backend rounds activations too.
    assert apart(ours, reference) < 0.1


def test_only_floats_are_quantised(tmp_path: Path, seed: int) -> None:
    model = wide("llama", tmp_path / "hf", seed)
    with pytest.raises(ConfigError, match="q8 or q4"):
        quantized(model, "q5")
    fields = VARIANTS["llama"].fields | WIDE
    path = tmp_path / "x.gguf"
    write_gguf(make(Variant("Llama", fields), seed), path, matrices="Q4_0")
    with pytest.raises(UnsupportedModelError, match="stored as Q4_0: only float checkpoints"):
        quantized(load_model(open_checkpoint(path)), "q8")


def test_a_half_precision_gguf_is_quantised(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(make(Variant("Llama", VARIANTS["llama"].fields | WIDE), seed), path, matrices="F16")
    model = load_model(open_checkpoint(path))
    driver = Driver(
        NativeBackend(), quantized(model, "q8"), np.random.default_rng(0), sequences=1, tokens=8
    )
    table = driver.backend.embedding_table()
    exact = model.weights["model.embed_tokens.weight"].dequantize()
    assert 0 < np.abs(table - exact).max() < np.abs(exact).max() / 100


def test_an_engine_directory_of_a_quantised_model_answers_as_it_does(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "tiny")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    answers = {}
    for how in (None, *QUANTIZE):
        engine = build_engine(source, tmp_path / f"engine-{how}", quantize=how).path
        with LLM(source, quantize=how) as theirs, LLM(engine) as ours:
            answers[how] = theirs.generate("Hello", params)
            assert ours.generate("Hello", params) == answers[how]
    assert answers[None].logprobs != answers["q8"].logprobs != answers["q4"].logprobs
    with pytest.raises(UnsupportedModelError, match="only float checkpoints"):
        LLM(engine, quantize="q8")


def test_the_bytes_of_a_quantised_weight_are_made_when_read(tmp_path: Path, seed: int) -> None:
    weight = wide("llama", tmp_path, seed).weights["model.layers.0.mlp.up_proj.weight"]
    ours = QuantizedWeight(weight, "Q8_0")
    assert ours.data.size == 96 * 64 // 32 * 34
    np.testing.assert_allclose(ours.dequantize(), weight.dequantize(), atol=0.05)
