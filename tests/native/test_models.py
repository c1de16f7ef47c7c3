"""Every architecture, and the two packaged models, on the native backend."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from steppe.backends.torch import TorchBackend
from steppe.formats.checkpoint import open_checkpoint
from steppe.models.registry import load_model
from steppe.text.tokenizer import Tokenizer
from tests.backends.programs import ArrayWeight
from tests.models.driver import Driver
from tests.native.blocks import bf16
from tests.native.built import VARIANTS, NativeBackend
from tests.oracle.zoo import VARIANTS as ARCHITECTURES
from tests.oracle.zoo import make, save

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_an_architecture_agrees_with_transformers(
    architecture: str, tmp_path: Path, seed: int, rng: np.random.Generator
) -> None:
    """Weights in float32; queries, keys, values and probabilities are bfloat16."""
    reference = make(ARCHITECTURES[architecture], seed)
    model = load_model(open_checkpoint(save(reference, tmp_path)))
    prompts = {i: rng.integers(0, model.vocab_size, length) for i, length in enumerate((1, 19, 90))}
    with torch.no_grad():
        expected = [
            reference(torch.tensor(prompt)[None], use_cache=False).logits[0].numpy()
            for prompt in prompts.values()
        ]
    for isa in VARIANTS:
        driver = Driver(NativeBackend(isa=isa, threads=2), model, rng, sequences=3, tokens=128)
        cuts = {i: int(rng.integers(len(prompt) + 1)) for i, prompt in prompts.items()}
        rows: dict[int, list[Any]] = {i: [] for i in prompts}
        for part in range(2):
            batch = {i: np.split(p, [cuts[i]])[part].tolist() for i, p in prompts.items()}
            batch = {i: tokens for i, tokens in batch.items() if tokens}
            if batch:
                logits = driver.step(batch, all_logits=True).logits
                ends = np.cumsum([len(tokens) for tokens in batch.values()])
                for i, piece in zip(batch, np.split(logits, ends[:-1]), strict=True):
                    rows[i].append(piece)
        ours = np.concatenate([np.concatenate(rows[i]) for i in prompts])
        theirs = np.concatenate(expected)
        errors = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
        # In a mixture, rounding gives some rows another expert.
        assert (np.median(errors) if "moe" in architecture else errors.max()) < 0.1, isa


def surprise(backend: Any, model: Any, tokens: Sequence[int]) -> np.ndarray:
    """-log probability of each token but the first."""
    driver = Driver(backend, model, np.random.default_rng(0), sequences=1, tokens=len(tokens))
    out = []
    for at in range(0, len(tokens), 256):
        logits = driver.step({0: tokens[at : at + 256]}, all_logits=True).logits
        following = np.array(tokens[at + 1 : at + 257])
        logits = logits[: len(following)]
        chosen = logits[np.arange(len(following)), following]
        out.append(torch.logsumexp(torch.from_numpy(logits), 1).numpy() - chosen)
    return np.concatenate(out)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["smollm2_gguf", "gemma3_gguf"])
def test_perplexity_is_that_of_the_reference(request: pytest.FixtureRequest, name: str) -> None:
    checkpoint = open_checkpoint(request.getfixturevalue(name))
    model = load_model(checkpoint)
    text = "\n".join(topics[key] for key in sorted(topics))
    tokens = Tokenizer.from_checkpoint(checkpoint).encode(text[:40_000])[:4096]
    assert len(tokens) == 4096
    expected = surprise(TorchBackend(), model, tokens).mean()
    for isa in VARIANTS[:1]:
        ours = surprise(NativeBackend(isa=isa), model, tokens).mean()
        assert abs(np.expm1(ours - expected)) < 0.01


PROMPTS = (
    "The capital of France is",
    "In 1969, the first humans",
    "def fibonacci(n):\n",
    "Water boils at",
    "She opened the letter and",
    "The three laws of thermodynamics state",
    "To bake bread you need",
    "Dear Sir or Madam,",
)


class _Rounded:
    """A model with every matrix rounded to bfloat16."""

    def __init__(self, model: Any) -> None:
        self._model = model
        made: dict[int, ArrayWeight] = {}
        for name, weight in model.weights.items():
            if id(weight) not in made:
                array = weight.dequantize()
                array = bf16(array) if array.ndim == 2 else array
                raw = (array.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
                kind = "BF16" if array.ndim == 2 else "other"
                made[id(weight)] = ArrayWeight(name, array, kind, raw)
        self.weights = {name: made[id(weight)] for name, weight in model.weights.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_tokens_of_bfloat16_weights_are_those_of_the_reference(smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    model = _Rounded(load_model(checkpoint))
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    prompts = {i: tokenizer.encode(text) for i, text in enumerate(PROMPTS)}
    ours, theirs = (
        Driver(backend, model, np.random.default_rng(0), sequences=8, tokens=64)
        for backend in (NativeBackend(), TorchBackend())
    )
    tokens, _ = ours.greedy(prompts, 32)
    expected, logits = theirs.greedy(prompts, 32, return_logits=True)
    for i in prompts:
        for step in range(32):
            best = np.sort(logits[step][i])[-2:]
            if best[1] - best[0] < 0.1:
                break  # from here on they may differ
            assert tokens[i][step] == expected[i][step], (PROMPTS[i], step)
