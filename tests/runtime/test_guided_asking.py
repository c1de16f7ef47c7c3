"""Sampling first and asking the grammar afterwards: the same tokens as with the masks first."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.backends.native import NativeBackend
from steppe.backends.torch import TorchBackend
from steppe.formats.checkpoint import open_checkpoint
from steppe.request import FinishReason, Guided, LLMGenerationRequest, SequenceOutput
from steppe.runtime.artifacts import load_artifacts
from steppe.runtime.config import RuntimeConfig
from steppe.runtime.guided.compiler import GrammarCompiler
from steppe.runtime.guided.state import GuidedState
from steppe.runtime.rank_runtime import LLMRankRuntime
from steppe.text.tokenizer import Tokenizer
from tests.runtime.fakes import EOS, IM_END, VOCAB, assert_clean, byte_tokenizer, fake_runtime
from tests.runtime.guides import BRIEF, guide, schemas
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

STOPS = frozenset({EOS, IM_END})


class MasksFirstNative(NativeBackend):
    """Keeps nothing, so that every row needs its mask before it is sampled."""

    kept_rows = 0


class MasksFirstTorch(TorchBackend):
    """The same of the other backend."""

    kept_rows = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("asking") / "tiny")


@cache
def runtime_on(model: Path, kind: type) -> LLMRankRuntime:
    backend = kind(threads=1)
    config = RuntimeConfig(max_batch_size=4, max_step_tokens=24)
    return LLMRankRuntime(artifacts=load_artifacts(model), backend=backend, config=config)


def answers(runtime: LLMRankRuntime, requests: list[LLMGenerationRequest]) -> list[SequenceOutput]:
    response = runtime.handle_request(LLMGenerationRequest.batch(requests))
    assert response is not None
    return list(response.outputs)


def facts(output: SequenceOutput) -> tuple[Any, ...]:
    return (
        output.token_ids,
        output.text,
        output.logprobs,
        output.finish_reason,
        output.stop_reason,
    )


ASKED = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.3]),
        "top_p": st.sampled_from([1.0, 1.0, 0.9]),
        "top_k": st.sampled_from([0, 0, 1, 20]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.2]),
        "min_tokens": st.sampled_from([0, 0, 7]),
        "logprobs": st.sampled_from([None, 0, 3]),
        "logit_bias": st.sampled_from([None, BRIEF]),
        "ignore_eos": st.booleans(),
        "seed": st.integers(0, 2**32),
    }
)


def compare(model: Path, asked: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    requests = [
        guide(Guided(json_schema=schema), "a prompt " * (1 + index), 60, **params)
        for index, (schema, params) in enumerate(asked)
    ]
    for kind, masks_first in ((NativeBackend, MasksFirstNative), (TorchBackend, MasksFirstTorch)):
        together = answers(runtime_on(model, kind), requests)
        expected = answers(runtime_on(model, masks_first), requests)
        assert [facts(one) for one in together] == [facts(one) for one in expected]
        for request, output in zip(requests, together, strict=True):
            assert facts(answers(runtime_on(model, kind), [request])[0]) == facts(output)
        assert_clean(runtime_on(model, kind))


@settings(max_examples=4)
@given(st.lists(st.tuples(schemas(), ASKED), min_size=1, max_size=3))
def test_the_answer_is_that_of_masks_first_on_both_backends(
    model: Path, asked: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    compare(model, asked)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=100)
@given(st.lists(st.tuples(schemas(), ASKED), min_size=1, max_size=3))
def test_the_answer_is_that_of_masks_first_in_many_more_cases(
    model: Path, asked: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    compare(model, asked)


# ---- what is asked ---------------------------------------------------------------------------


def members(mask: np.ndarray | None, vocab: int) -> np.ndarray:
    assert mask is not None
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab].astype(bool)


def check_along(
    compiler: GrammarCompiler, guided: Guided, vocab: int, rng: np.random.Generator
) -> int:
    """On a random way through a grammar, each state allows what its mask has. Returns in how many
    places one token was all it had and could be told without it.
    """
    alone = 0
    stops = STOPS if vocab < 1000 else frozenset({2})
    compiled = compiler.prepare(guided).compiled
    asked, masked = GuidedState(compiled, stops), GuidedState(compiled, stops)
    for _ in range(12):
        (mask,) = masked.masks()
        expected = members(mask, vocab)
        inside = np.flatnonzero(expected)
        some = [*rng.choice(vocab, 25).tolist(), *stops, -1]
        some += rng.choice(inside, min(25, inside.size), replace=False).tolist()
        for token_id in some:
            assert asked.allows(token_id) == (token_id >= 0 and expected[token_id]), token_id
            assert not asked.complete
        only = asked.only()
        if only is not None:
            alone += 1
            assert inside.tolist() == [only]
        (again,) = asked.masks()
        assert np.array_equal(again, mask)
        assert (asked.complete, asked.error) == (masked.complete, masked.error)
        going = [token_id for token_id in inside.tolist() if token_id not in stops]
        if not going:
            break
        token_id = int(rng.choice(going))
        if rng.random() < 0.7:  # as in a step, where the token that was allowed is accepted next
            other = int(rng.choice(going))
            assert asked.allows(other if rng.random() < 0.3 else token_id)
        for state in (asked, masked):
            state.accept(token_id)
    return alone


@cache
def byte_grammars() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), VOCAB + 70, STOPS)


@settings(max_examples=40)
@given(schemas(), st.integers(0, 2**32))
def test_a_token_is_allowed_exactly_where_the_mask_has_it(
    schema: dict[str, Any], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    check_along(byte_grammars(), Guided(json_schema=schema), VOCAB, rng)


def test_so_it_is_where_tokens_are_words(smollm2_gguf: Path, rng: np.random.Generator) -> None:
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(smollm2_gguf))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, {2})
    record = {
        "type": "object",
        "properties": {
            "a long name": {"enum": ["some words", "some wörds", 12345]},
            "tail": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 3},
        },
        "required": ["a long name", "tail"],
        "additionalProperties": False,
    }
    guides = [
        Guided(json_schema=record),
        Guided(json_object=True, after="</think>"),
        Guided(regex="[a-z ]+ing|<[0-9]{3,9}>"),
        Guided(choice=["yes", "not at all", "https://example.com/"]),
    ]
    for guided in guides:
        for _ in range(3):
            check_along(compiler, guided, tokenizer.vocab_size, rng)
    written = Guided(regex='\\{"a long name": "some words"\\}')
    assert check_along(compiler, written, tokenizer.vocab_size, rng) > 3


# ---- who is asked ----------------------------------------------------------------------------


def test_only_refused_tokens_cost_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[GuidedState] = []
    real = GuidedState.masks

    def counting(self: GuidedState, *arguments: Any) -> Any:
        masks.append(self)
        return real(self, *arguments)

    monkeypatch.setattr(GuidedState, "masks", counting)
    runtime, backend = fake_runtime()
    favoured = {ord("a"): 80.0}
    (output,) = answers(runtime, [guide(Guided(regex="a{9}b"), temperature=0, logit_bias=favoured)])
    assert output.text == "a" * 9 + "b"
    # The tenth letter, and the end behind it.
    assert backend.resampled == [1, 1]
    assert len(masks) == 2
    drawn = guide(Guided(regex="a{9}b"), temperature=1.0, logit_bias=favoured)
    assert answers(runtime, [drawn])[0].text == output.text
    assert backend.resampled == [1, 1, 1, 1]
    assert len(masks) == 2 + 2
    # What a filter leaves of all tokens is not what it leaves of the allowed ones.
    for filters in ({"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        masks.clear()
        filtered = guide(Guided(regex="a{9}b"), temperature=1.0, logit_bias=favoured, **filters)
        assert answers(runtime, [filtered])[0].text == output.text
        assert backend.resampled == [1, 1, 1, 1]
        assert len(masks) == 11


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_where_one_text_is_left_nothing_is_drawn_again(temperature: float) -> None:
    text = "all of it is written"
    written = Guided(regex=f"{text}[!?]")
    runtime, backend = fake_runtime()
    (output,) = answers(runtime, [guide(written, temperature=temperature, seed=1)])
    assert output.text[:-1] == text
    assert len(backend.resampled) <= 2  # what stands behind it, and the end
    # What is said about a token has to be computed, and it is the same token.
    runtime, backend = fake_runtime()
    (told,) = answers(runtime, [guide(written, temperature=temperature, seed=1, logprobs=0)])
    assert (told.token_ids, told.text) == (output.token_ids, output.text)
    assert told.logprobs is not None
    assert len(backend.resampled) > 15
    assert_clean(runtime)


def test_a_step_with_more_rows_than_are_kept_has_masks_first() -> None:
    runtime, backend = fake_runtime()
    expected = answers(runtime, [guide(Guided(regex="[x-z]{9}"), temperature=0)])
    assert backend.resampled
    for kept in (0, 1, 2, 3):
        runtime, backend = fake_runtime()
        backend.kept_rows = kept
        runtime.executor = type(runtime.executor)(backend)
        crowd = [guide(Guided(regex="[x-z]{9}"), temperature=0)] * 3
        for output in answers(runtime, crowd):
            assert facts(output) == facts(expected[0])
        assert bool(backend.resampled) == (kept == 3)


def test_a_fault_while_a_grammar_is_asked_is_its_requests_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = guide(Guided(regex="[a-z]{12}"), "good", temperature=0)
    mark = ord("!")
    bad = guide(Guided(regex="[a-z]{12}"), "bad", temperature=0, stop_token_ids=[mark])
    runtime, _ = fake_runtime()
    (alone,) = answers(runtime, [good])
    real = GuidedState.allows
    asked: list[int] = []

    def failing(self: GuidedState, token_id: int) -> bool:
        if mark in self._stop_ids:
            asked.append(token_id)
            if len(asked) == 4:
                self.error = "too large"
        return real(self, token_id)

    monkeypatch.setattr(GuidedState, "allows", failing)
    first, second = answers(runtime, [bad, good])
    assert first.finish_reason is FinishReason.ERROR
    assert len(first.token_ids) == 3
    assert second.token_ids == alone.token_ids
    assert_clean(runtime)
