"""Frequencies against transformers, on fresh random parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from steppe.errors import CheckpointError, UnsupportedModelError
from steppe.models.rope import (
    default_rope,
    extended_positions,
    gguf_rope,
    hf_parameters,
    rope_from_parameters,
)

# One unit in the last place: powers are rounded differently by different libraries.
ULP = 1.3e-7

dims = st.integers(1, 128).map(lambda half: 2 * half)
thetas = st.floats(2.0, 1e7)
factors = st.floats(1.0, 64.0)
originals = st.integers(16, 131_072)
linear = st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors})
llama3 = st.fixed_dictionaries(
    {
        "rope_type": st.just("llama3"),
        "factor": factors,
        "low_freq_factor": st.floats(0.5, 2.0),
        "high_freq_factor": st.floats(3.0, 32.0),
        "original_max_position_embeddings": originals,
    }
)
yarn = st.fixed_dictionaries(
    {
        "rope_type": st.just("yarn"),
        "factor": factors,
        "original_max_position_embeddings": originals,
    },
    optional={
        "attention_factor": st.floats(0.1, 4.0),
        "beta_fast": st.floats(8.0, 64.0),
        "beta_slow": st.floats(0.5, 4.0),
        "mscale": st.floats(0.1, 2.0),
        "mscale_all_dim": st.floats(0.1, 2.0),
        "truncate": st.booleans(),
    },
)


def theirs(dim: int, parameters: dict[str, Any]) -> tuple[np.ndarray[Any, Any], float]:
    config = LlamaConfig(
        head_dim=dim, rope_parameters=dict(parameters), max_position_embeddings=2**20
    )
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        rule: Any = LlamaRotaryEmbedding.compute_default_rope_parameters
    else:
        rule = ROPE_INIT_FUNCTIONS[kind]
    frequencies, scale = rule(config)
    return frequencies.numpy(), float(scale)


def compare(dim: int, parameters: dict[str, Any]) -> None:
    ours = rope_from_parameters(parameters, {"max_position_embeddings": 2048}, dim)
    frequencies, scale = theirs(dim, parameters)
    assert ours.inv_freq.dtype == np.float32
    # A ramp blends the frequency with a smaller one: the last place of the larger counts.
    ramp = parameters["rope_type"] != "linear"
    scale_of_error = default_rope(dim, parameters["rope_theta"]).inv_freq if ramp else frequencies
    assert np.all(np.abs(ours.inv_freq - frequencies) <= (16 if ramp else 2) * ULP * scale_of_error)
    assert ours.scale == pytest.approx(scale, rel=1e-12)


@given(dims, thetas)
def test_default(dim: int, theta: float) -> None:
    ours = rope_from_parameters({"rope_theta": theta}, {}, dim)
    frequencies, scale = theirs(dim, {"rope_type": "default", "rope_theta": theta})
    np.testing.assert_allclose(ours.inv_freq, frequencies, rtol=2 * ULP)
    assert ours.scale == scale == 1.0


@given(dims, thetas, linear)
def test_linear(dim: int, theta: float, parameters: dict[str, Any]) -> None:
    compare(dim, {"rope_theta": theta, **parameters})


@given(dims, thetas, llama3)
def test_llama3(dim: int, theta: float, parameters: dict[str, Any]) -> None:
    compare(dim, {"rope_theta": theta, **parameters})


@given(dims, thetas, yarn)
def test_yarn(dim: int, theta: float, parameters: dict[str, Any]) -> None:
    compare(dim, {"rope_theta": theta, **parameters})


def test_older_files_say_the_same_elsewhere() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    old = {"rope_theta": 500.0, "rope_scaling": scaling, "max_position_embeddings": 64}
    new = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}}
    ours = [rope_from_parameters(hf_parameters(c), c, 8) for c in (old, new)]
    np.testing.assert_array_equal(ours[0].inv_freq, ours[1].inv_freq)
    assert ours[0].inv_freq[1] == pytest.approx(500**-0.25 / 2)
    plain = {"rope_theta": 500.0, "rope_scaling": None}
    assert rope_from_parameters(hf_parameters(plain), plain, 8).inv_freq[0] == 1.0


def test_scaling_starts_from_the_positions_around_it() -> None:
    parameters = {"rope_type": "yarn", "factor": 4.0}
    around = {"max_position_embeddings": 64}
    stated = parameters | {"original_max_position_embeddings": 64}
    ours = [rope_from_parameters(p, around, 16).inv_freq for p in (parameters, stated)]
    np.testing.assert_array_equal(*ours)
    outside = around | {"original_max_position_embeddings": 32}
    assert extended_positions(stated, outside) == 128
    assert extended_positions(stated, around) == 256
    assert extended_positions({"rope_type": "linear", "factor": 4.0}, around) == 64
    # A missing factor is the ratio of the two lengths.
    no_factor = {"rope_type": "yarn", "original_max_position_embeddings": 16}
    with_factor = no_factor | {"factor": 4.0}
    ours = [rope_from_parameters(p, around, 16).inv_freq for p in (no_factor, with_factor)]
    np.testing.assert_array_equal(*ours)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "proportional", "mrope", "ntk"])
def test_unknown_types_are_refused_by_name(kind: str) -> None:
    parameters = {"rope_type": kind, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=kind):
        rope_from_parameters(parameters, {"max_position_embeddings": 64}, 8)


@pytest.mark.parametrize(
    ("parameters", "error", "named"),
    [
        ({"mrope_section": [1, 1, 2]}, UnsupportedModelError, "mrope_section"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor"),
        ({"rope_type": "linear"}, CheckpointError, "factor is missing"),
        ({"rope_type": "linear", "factor": 0}, CheckpointError, "factor"),
        ({"rope_type": 3}, CheckpointError, "rope_type"),
        ({"rope_theta": "many"}, CheckpointError, "rope_theta"),
        ({"rope_theta": float("inf")}, CheckpointError, "rope_theta"),
        ({"rope_theta": 10**400}, CheckpointError, "rope_theta"),
        ({"rope_theta": 1.0, "rope_type": "yarn", "factor": 2.0}, CheckpointError, "rope_theta"),
        (
            {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
            },
            CheckpointError,
            "high_freq_factor",
        ),
    ],
)
def test_what_cannot_be_is_named(
    parameters: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        rope_from_parameters(parameters, {"max_position_embeddings": 64}, 8)


def test_gguf_yarn_reads_its_betas_and_its_extra_factor() -> None:
    metadata = {
        "llama.context_length": 4096,
        "llama.rope.freq_base": 20_000.0,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 8.0,
        "llama.rope.scaling.original_context_length": 512,
        "llama.rope.scaling.yarn_beta_fast": 20.0,
        "llama.rope.scaling.yarn_beta_slow": 2.0,
        "llama.rope.scaling.attn_factor": 1.5,
    }
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 20_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
    }
    ours = gguf_rope(metadata, {}, "llama", 64)
    frequencies, scale = theirs(64, parameters)
    np.testing.assert_allclose(ours.inv_freq, frequencies, rtol=8 * ULP)
    assert ours.scale == pytest.approx(1.5 * scale)


def test_gguf_scaling_before_types_had_names() -> None:
    ours = gguf_rope({"llama.rope.scale_linear": 4.0}, {}, "llama", 8)
    assert ours.inv_freq[0] == 0.25


@pytest.mark.parametrize("key", ["yarn_log_multiplier", "yarn_ext_factor"])
def test_gguf_yarn_variants_are_refused(key: str) -> None:
    metadata = {
        "llama.context_length": 64,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        f"llama.rope.scaling.{key}": 0.5,
    }
    with pytest.raises(UnsupportedModelError, match=key):
        gguf_rope(metadata, {}, "llama", 8)
