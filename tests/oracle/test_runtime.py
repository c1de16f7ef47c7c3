"""The whole runtime over a checkpoint on disk against transformers: tokens, scores, states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from steppe.backends.torch import TorchBackend
from steppe.request import LLMGenerationRequest
from steppe.runtime.config import RuntimeConfig
from steppe.runtime.rank_runtime import LLMRankRuntime
from tests.oracle.zoo import Variant, make, save
from tests.runtime.asking import ask
from tests.runtime.fakes import EOS, VOCAB, byte_core

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel


@dataclass
class Checkpoint:
    """A folder as a model hub would have it, and the model it holds."""

    path: Path
    model: PreTrainedModel

    def logits(self, tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            return self.model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()

    def hidden(self, tokens: list[int]) -> list[np.ndarray]:
        with torch.no_grad():
            out = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        return [states[0].numpy() for states in out.hidden_states]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("tiny-llama")
    model = make(
        Variant("Llama", {"vocab_size": VOCAB, "eos_token_id": EOS, "head_dim": 16}), seed=20261129
    )
    save(model, path)
    byte_core().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return Checkpoint(path, model)


def torch_backend() -> Any:
    return TorchBackend(device="cpu", dtype="float32", page_size=8)


def native_backend() -> Any:
    from tests.native.built import NativeBackend  # skips where the extension is not built

    return NativeBackend(threads=1)


def runtime_of(
    checkpoint: Checkpoint, max_step_tokens: int = 512, backend: Any = None
) -> LLMRankRuntime:
    backend = backend or torch_backend()
    config = RuntimeConfig(max_batch_size=8, max_step_tokens=max_step_tokens)
    return LLMRankRuntime(checkpoint.path, backend=backend, config=config)


def test_greedy_tokens_are_the_likeliest_of_transformers(checkpoint: Checkpoint) -> None:
    runtime = runtime_of(checkpoint)
    prompts = ["one", "another prompt", "x"]
    batch = LLMGenerationRequest.batch([ask(prompt, 16, logprobs=0) for prompt in prompts])
    response = runtime.handle_request(batch)
    assert response is not None
    for prompt, output in zip(prompts, response.outputs, strict=True):
        known = [*prompt.encode(), *output.token_ids]
        rows = checkpoint.logits(known)[len(prompt) - 1 : -1]
        chosen = rows[np.arange(16), list(output.token_ids)]
        np.testing.assert_allclose(chosen, rows.max(axis=1), atol=1e-4)
        assert output.logprobs is not None
        expected = chosen - np.log(np.exp(rows.astype(np.float64)).sum(axis=1))
        said = [one.logprob for one in output.logprobs]
        np.testing.assert_allclose(said, expected, atol=1e-4)


@pytest.mark.parametrize("backend", [torch_backend, native_backend])
def test_company_changes_no_bit(checkpoint: Checkpoint, backend: Callable[[], Any]) -> None:
    runtime = runtime_of(checkpoint, 7, backend())
    request = ask("the same to the bit", 12, logprobs=3, prompt_logprobs=1, temperature=1.0, seed=2)
    alone = runtime.handle_request(request)
    assert alone is not None
    neighbours = [ask(f"neighbour {index}" * (index + 1), 4 + index) for index in range(3)]
    crowd = runtime.handle_request(LLMGenerationRequest.batch([*neighbours, request]))
    assert crowd is not None
    assert crowd.outputs[3].token_ids == alone.token_ids
    assert crowd.outputs[3].logprobs == alone.logprobs
    assert crowd.outputs[3].prompt_logprobs == alone.outputs[0].prompt_logprobs


def test_hidden_states_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    runtime = runtime_of(checkpoint, max_step_tokens=5)
    prompts = [list(b"hidden states"), list(b"short")]
    batch = LLMGenerationRequest.batch([ask(prompt, 2) for prompt in prompts])
    assert runtime.handle_request(batch, hidden_layers=[0, 1, 2, -1]) is not None
    for row, prompt in enumerate(prompts):
        expected = checkpoint.hidden(prompt)
        for layer in (0, 1, 2, -1):
            states = runtime.base_model_hidden_states(layer)
            assert states is not None
            np.testing.assert_allclose(
                states[row, : len(prompt)], expected[layer], atol=1e-4, rtol=1e-4
            )
            assert not states[row, len(prompt) :].any()
