"""Every architecture against transformers, in float32: logits and greedy tokens, alone and in a
ragged batch.

Greedy equality is shown by induction: each of our tokens is the likeliest by transformers' logits
given all of ours before it. Two candidates closer than the logits' tolerance may change places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from steppe.formats.checkpoint import open_checkpoint
from steppe.models.registry import load_model
from tests.models.driver import Driver
from tests.models.numpy_backend import NumpyBackend
from tests.oracle.zoo import VARIANTS, make, save

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

TOLERANCE = 1e-4
ROUTING_MARGIN = 1e-5
NEW_TOKENS = 64
LENGTHS = (1, 4, 11, 19, 30)


def numpy_backend() -> Any:
    return NumpyBackend(page_size=4)


def torch_backend() -> Any:
    from steppe.backends.torch import TorchBackend

    return TorchBackend(device="cpu", dtype="float32", page_size=16)


BACKENDS = {"numpy": numpy_backend, "torch": torch_backend}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    return BACKENDS[request.param]()


def reference_logits(reference: PreTrainedModel, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits after every token, computed in one pass without a cache.

    Rows are nan from the first token on whose choice of experts rounding could change.
    """
    routed = "num_experts_per_tok" in reference.config.to_dict()
    asked = {"output_router_logits": True} if routed else {}
    with torch.no_grad():
        out = reference(torch.tensor([list(map(int, tokens))]), use_cache=False, **asked)
    logits: NDArray[np.float32] = out.logits[0].float().numpy()
    for router in out.router_logits if routed else ():
        chances = router.softmax(-1).sort(descending=True).values
        last = reference.config.num_experts_per_tok - 1
        close = np.flatnonzero(chances[:, last] - chances[:, last + 1] < ROUTING_MARGIN)
        logits[close[0] if len(close) else len(logits) :] = np.nan
    return logits


def check_logits(ours: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    decided = ~np.isnan(expected[:, 0])
    np.testing.assert_allclose(ours[decided], expected[decided], rtol=0, atol=TOLERANCE)


def check_greedy(reference: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Each token is transformers' choice given those before it."""
    rows = reference_logits(reference, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        if not np.isnan(row[0]):
            best = row.max()
            assert row[token] >= best - TOLERANCE, f"token {place}: {token}, not {row.argmax()}"


def closest_call(reference: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """The smallest distance between the two best candidates on the way; nan if undecided."""
    rows = reference_logits(reference, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    best = np.sort(rows, axis=-1)
    return float((best[:, -1] - best[:, -2]).min())


def test_architecture(
    variant: str, backend: Any, tmp_path: Path, seed: int, rng: np.random.Generator
) -> None:
    reference = make(VARIANTS[variant], seed)
    model = load_model(open_checkpoint(save(reference, tmp_path)))
    assert model.vocab_size == reference.config.vocab_size

    driver = Driver(backend, model, rng, sequences=7, tokens=LENGTHS[-1] + NEW_TOKENS)
    prompts = {i: rng.integers(0, model.vocab_size, length) for i, length in enumerate(LENGTHS)}

    # Alone: all logits of a prompt that is fed in two pieces.
    prompt, cut = prompts[4], int(rng.integers(1, LENGTHS[-1]))
    out = [driver.step({5: part}, all_logits=True) for part in np.split(prompt, [cut])]
    ours = np.concatenate([part.logits for part in out])
    expected = reference_logits(reference, prompt)
    check_logits(ours, expected)

    # Alone: greedy, with transformers' own cache and generation loop.
    alone, _ = driver.greedy({6: prompts[3]}, NEW_TOKENS)
    generated = reference.generate(
        torch.tensor(prompts[3])[None],
        attention_mask=torch.ones(1, LENGTHS[3], dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    check_greedy(reference, prompts[3], alone[6])
    theirs = generated[0, LENGTHS[3] :].tolist()
    check_greedy(reference, prompts[3], theirs)
    if closest_call(reference, prompts[3], theirs) > TOLERANCE:
        assert alone[6] == theirs

    # Five of different lengths in one batch.
    tokens, logits = driver.greedy(prompts, NEW_TOKENS, return_logits=True)
    for sequence, prompt in prompts.items():
        check_greedy(reference, prompt, tokens[sequence])
        expected = reference_logits(reference, [*prompt, *tokens[sequence][:-1]])[len(prompt) - 1 :]
        ours = np.stack([step[sequence] for step in logits])
        check_logits(ours, expected)


def test_hidden_states(
    variant: str, backend: Any, tmp_path: Path, seed: int, rng: np.random.Generator
) -> None:
    reference = make(VARIANTS[variant], seed)
    model = load_model(open_checkpoint(save(reference, tmp_path)))
    layers = model.config.num_layers
    names = (*(f"hidden[{i}]" for i in range(layers + 1)), "final_hidden")
    driver = Driver(backend, model, rng, sequences=1, tokens=12)
    tokens = rng.integers(0, model.vocab_size, 12)
    out = driver.step({0: tokens}, outputs=names)
    with torch.no_grad():
        theirs = reference(torch.tensor(tokens)[None], output_hidden_states=True).hidden_states
    # The last of theirs is normalised already.
    for name, expected in zip((*names[:layers], "final_hidden"), theirs, strict=True):
        np.testing.assert_allclose(out.hidden[name], expected[0], rtol=0, atol=TOLERANCE)
    last = out.hidden[f"hidden[{layers}]"].astype(np.float64)
    norm = model.weights["model.norm.weight"].dequantize()
    size = np.sqrt((last**2).mean(-1, keepdims=True) + model.config.rms_norm_eps)
    np.testing.assert_allclose(last / size * norm, out.hidden["final_hidden"], rtol=0, atol=1e-4)
