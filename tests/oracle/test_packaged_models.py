"""The two real models that come as packages: greedy tokens against transformers, which reads and
dequantises the same GGUF file with its own code.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from steppe.backends.torch import TorchBackend
from steppe.formats.checkpoint import open_checkpoint
from steppe.models.registry import load_model
from steppe.text.tokenizer import Tokenizer
from tests.models.driver import Driver

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "Die Hauptstadt von Deutschland ist",
    "1, 2, 3, 5, 8,",
    "Q: Why is the sky blue?\nA:",
    "In 1969, the first human being to walk on the Moon was Neil Armstrong. He said:",
)
NEW_TOKENS = 40
MARGIN = 0.005


def read_with_transformers(path: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """What ``from_pretrained(gguf_file=...)`` does, without the package it wants for placement."""
    # It parses the file once for the configuration and once for the tensors, slowly.
    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
    config = AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict(tensors, strict=False, assign=True)
    assert left.missing_keys in ([], ["lm_head.weight"])
    assert left.unexpected_keys == []
    model.tie_weights()
    return model


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["smollm2_gguf", "gemma3_gguf"])
def test_greedy_tokens_equal_those_of_transformers(
    name: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    path: Path = request.getfixturevalue(name)
    reference = read_with_transformers(path, monkeypatch)
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint)
    state: dict[str, Any] = reference.state_dict()
    for key, weight in model.weights.items():
        stored = state[key].numpy()
        # Their norm weights are ours less one, by a subtraction in float32.
        offset = 1 if name == "gemma3_gguf" and key.endswith("norm.weight") else 0
        np.testing.assert_allclose(weight.dequantize(), stored + offset, rtol=0, atol=offset * 1e-6)

    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    prompts = dict(enumerate(tokenizer.encode(prompt) for prompt in PROMPTS))
    longest = max(map(len, prompts.values())) + NEW_TOKENS
    backend = TorchBackend(device="cpu", dtype="float32", page_size=16)
    driver = Driver(backend, model, rng, sequences=len(prompts), tokens=longest)
    tokens, _ = driver.greedy(prompts, NEW_TOKENS)

    compared = 0
    for number, prompt in prompts.items():
        ours = tokens[number]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ours[:-1]]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 :].numpy()
        for row, token in zip(rows, ours, strict=True):
            second, best = np.partition(row, -2)[-2:]
            if best - second < MARGIN:
                break
            assert token == row.argmax(), (PROMPTS[number], tokenizer.decode(ours))
            compared += 1
    assert compared >= len(prompts) * NEW_TOKENS // 4
