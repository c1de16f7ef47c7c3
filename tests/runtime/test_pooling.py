"""Embeddings: what the checkpoint says, and the same vector in any company and any chunks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from steppe import LLM, ContextLengthError, LLMGenerationRequest, SamplingParams
from steppe.errors import CheckpointError, UnsupportedModelError
from steppe.formats.checkpoint import open_checkpoint
from steppe.runtime.pooling import add_rows, read_pooling, unit_length
from tests.tiny_model import CONTEXT, write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["a", "Hello, world", "The quick brown fox " * 5]


def say_pooling(model: Path, **modes: bool) -> Path:
    folder = model / "1_Pooling"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {"word_embedding_dimension": 32, **{f"pooling_mode_{k}": v for k, v in modes.items()}}
        )
    )
    return model


def reference(model: Path, text: str, pooling: str) -> Any:
    """By transformers, in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        states = theirs.model(torch.tensor([list(text.encode())])).last_hidden_state[0].double()
    pooled = states[-1] if pooling == "last" else states.mean(0)
    return (pooled / pooled.norm()).numpy()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_equal_transformers_hidden_states(tmp_path: Path, pooling: str) -> None:
    model = write_tiny_model(tmp_path / "m")
    say_pooling(model, mean_tokens=pooling == "mean", lasttoken=pooling == "last")
    with LLM(model, backend="torch") as llm:
        vectors = llm.embed(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        np.testing.assert_allclose(vector, reference(model, text, pooling), atol=1e-4)
        assert np.isclose(np.square(vector).sum(), 1.0)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_company_and_chunks_change_no_bit_of_an_embedding(tmp_path: Path, pooling: str) -> None:
    model = write_tiny_model(tmp_path / "m")
    say_pooling(model, mean_tokens=pooling == "mean", lasttoken=pooling == "last")
    with LLM(model, backend="torch") as llm:
        alone = [llm.embed(text) for text in TEXTS]
    with LLM(model, backend="torch", max_step_tokens=7, kv_memory=2**20) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        busy = [llm.engine.submit(LLMGenerationRequest(text, params=params)) for text in TEXTS]
        assert llm.embed(TEXTS) == alone
        assert [handle.get().finish_reason for handle in busy] == ["length"] * 3


def test_a_text_may_fill_the_context_but_not_pass_it(tmp_path: Path) -> None:
    with LLM(write_tiny_model(tmp_path / "m")) as llm:
        assert len(llm.embed("x" * CONTEXT)) == 32
        with pytest.raises(ContextLengthError, match=str(CONTEXT + 1)):
            llm.embed("x" * (CONTEXT + 1))


def test_nothing_said_means_the_last_token(tmp_path: Path) -> None:
    assert read_pooling(open_checkpoint(write_tiny_model(tmp_path / "m"))) == "last"


@pytest.mark.parametrize(
    "modes", [{"cls_token": True}, {}, {"mean_tokens": True, "max_tokens": True}]
)
def test_other_poolings_are_refused(tmp_path: Path, modes: dict[str, bool]) -> None:
    model = say_pooling(write_tiny_model(tmp_path / "m"), **modes)
    with pytest.raises(UnsupportedModelError, match="pooling"):
        read_pooling(open_checkpoint(model))


def test_a_damaged_pooling_file_is_named(tmp_path: Path) -> None:
    model = say_pooling(write_tiny_model(tmp_path / "m"), mean_tokens=True)
    (model / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="1_Pooling"):
        read_pooling(open_checkpoint(model))


def test_rows_add_up_to_the_same_bits_however_they_are_cut(rng: np.random.Generator) -> None:
    rows = rng.normal(size=(37, 5)).astype(np.float32) * 10.0 ** rng.integers(-3, 4, (37, 1))
    rows = rows.astype(np.float32)
    whole = add_rows(None, rows)
    cut = int(rng.integers(1, 37))
    parts = add_rows(add_rows(None, rows[:cut]), rows[cut:])
    assert whole.tobytes() == parts.tobytes()
    np.testing.assert_allclose(whole, rows.astype(np.float64).sum(0))


def test_a_zero_vector_stays_zero() -> None:
    assert unit_length(np.zeros(3)) == (0.0, 0.0, 0.0)
