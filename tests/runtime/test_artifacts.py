"""From a checkpoint on disk to a runtime. What it then computes is checked in ``tests/oracle``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from steppe.errors import ModelError, ModelNotFoundError
from steppe.runtime.artifacts import load_artifacts
from steppe.runtime.config import RuntimeConfig
from steppe.runtime.rank_runtime import LLMRankRuntime
from tests.models.numpy_backend import NumpyBackend
from tests.runtime.asking import ask
from tests.runtime.fakes import EOS, IM_END, TEMPLATE, VOCAB, byte_core

if TYPE_CHECKING:
    from pathlib import Path

WIDTH, INNER, HEADS, HEAD, LAYERS = 24, 40, 4, 6, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": EOS,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a model hub would have it."""
    path = tmp_path_factory.mktemp("tiny-llama")
    rng = np.random.default_rng(5)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) / columns**0.5).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, WIDTH) * 3}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * HEAD, WIDTH),
            f"{name}.self_attn.k_proj.weight": matrix(HEADS * HEAD, WIDTH),
            f"{name}.self_attn.v_proj.weight": matrix(HEADS * HEAD, WIDTH),
            f"{name}.self_attn.o_proj.weight": matrix(WIDTH, HEADS * HEAD),
            f"{name}.mlp.gate_proj.weight": matrix(INNER, WIDTH),
            f"{name}.mlp.up_proj.weight": matrix(INNER, WIDTH),
            f"{name}.mlp.down_proj.weight": matrix(WIDTH, INNER),
            f"{name}.input_layernorm.weight": np.ones(WIDTH, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(WIDTH, np.float32),
        }
    tensors["model.norm.weight"] = np.ones(WIDTH, np.float32)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    write(path / "config.json", CONFIG)
    write(path / "tokenizer_config.json", {"eos_token": "<|end|>", "chat_template": TEMPLATE})
    write(
        path / "generation_config.json",
        {"eos_token_id": [EOS, IM_END], "do_sample": True, "temperature": 0.5, "top_k": 7},
    )
    byte_core().save(str(path / "tokenizer.json"))
    return path


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def test_artifacts_are_all_that_a_checkpoint_says(checkpoint: Path) -> None:
    stages: list[str] = []
    artifacts = load_artifacts(checkpoint, on_progress=stages.append)
    assert stages == ["opening", "tokenizer", "graph"]
    assert artifacts.name.startswith("tiny-llama")
    assert artifacts.program.vocab_size == VOCAB
    assert artifacts.program.max_positions == 128
    assert len(artifacts.program.layers) == LAYERS
    assert artifacts.stop_token_ids == {EOS, IM_END}
    assert dict(artifacts.generation_defaults) == {"temperature": 0.5, "top_k": 7}
    assert artifacts.tokenizer.encode("hé") == list("hé".encode())
    assert artifacts.chat_template is not None


def test_a_base_model_has_no_template(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).symlink_to(file)
    write(tmp_path / "tokenizer_config.json", {"eos_token": "<|end|>"})
    assert load_artifacts(tmp_path).chat_template is None


def test_a_reference_that_leads_nowhere_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load_artifacts(tmp_path / "missing")
    with pytest.raises(ModelError):
        load_artifacts(tmp_path)


def test_both_constructors_make_the_same_runtime(checkpoint: Path) -> None:
    stages: list[str] = []
    config = RuntimeConfig(max_batch_size=2)
    by_path = LLMRankRuntime(
        checkpoint, backend=NumpyBackend(), config=config, on_progress=stages.append
    )
    assert stages == ["opening", "tokenizer", "graph", "weights"]
    by_artifacts = LLMRankRuntime(
        artifacts=load_artifacts(checkpoint), backend=NumpyBackend(), config=config
    )
    request = ask("either way", 5)
    answer = by_path.handle_request(request)
    assert answer is not None
    assert len(answer.token_ids) == 5
    assert by_artifacts.handle_request(request) == answer
    assert by_path.embedding_table.shape == (VOCAB, WIDTH)


def test_a_shorter_context_reaches_the_model_and_the_limits(checkpoint: Path) -> None:
    runtime = LLMRankRuntime(
        checkpoint, backend=NumpyBackend(), config=RuntimeConfig(max_batch_size=1, max_model_len=32)
    )
    assert runtime.preparation.context_length == 32
    assert runtime.pool.capacity * runtime.pool.page_size == 32
