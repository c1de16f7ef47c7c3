"""The tail of a step runs on the rows that are wanted, and on no others: same bits as with all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.backends.base import SampleBatch
from steppe.backends.tape import CacheSpec, Graph
from tests.backends.programs import TinyProgram, cut, sample_rows, tokens_of
from tests.models.driver import Driver
from tests.native.built import VARIANTS, NativeBackend
from tests.native.test_backend import SHAPES, floats, plain_step, quantised

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.backends.base import StepInput, StepOutput

NAMES = ("hidden[0]", "hidden[1]", "hidden[2]", "final_hidden")
PLAIN = {
    **SHAPES["plain"],
    "layers": (CacheSpec(2, 32), CacheSpec(2, 32, window=40)),
    "hidden": 64,
    "inner": 96,
}
MODELS = {"plain": PLAIN, "capped": {**PLAIN, "softcap": 9.0}, "experts": {**PLAIN, "experts": 3}}


@settings(max_examples=30)
@given(data=st.data())
def test_a_row_has_the_same_bits_whoever_else_is_wanted(data: st.DataObject) -> None:
    """Some tokens' logits (as for prompt logprobs), some outputs at some rows (as for embeddings),
    steps that want nothing (chunks of a prompt), against one step that returns all of everything.
    """
    seed = data.draw(st.integers(0, 2**32 - 1))
    isa = data.draw(st.sampled_from(VARIANTS))
    model = MODELS[data.draw(st.sampled_from(sorted(MODELS)))]
    dtype = data.draw(st.sampled_from(["F32", "Q4_1", "Q8_0"]))
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 140, 3).tolist()
    prompts = tokens_of(rng, 61, lengths)

    def driver() -> Driver:
        weights = np.random.default_rng(seed)
        program = TinyProgram(weights, **model)
        program = floats(program) if dtype == "F32" else quantised(program, weights, dtype)
        backend = NativeBackend(threads=data.draw(st.integers(1, 3)), isa=isa)
        return Driver(backend, program, rng, sequences=3, tokens=140)

    whole = driver().step(dict(enumerate(prompts)), all_logits=True, outputs=NAMES)
    assert whole.logits is not None
    first = np.cumsum([0, *lengths])
    size = data.draw(st.sampled_from([1, 5, 64, 140]))
    chunks = {s: cut(rng, length, size) for s, length in enumerate(lengths)}
    chosen = driver()
    at = dict.fromkeys(chunks, 0)
    while chunks:
        batch, tokens = {}, []
        for sequence in rng.permutation(list(chunks)).tolist():
            count = chunks[sequence].pop(0)
            start = at[sequence]
            batch[sequence] = prompts[sequence][start : start + count]
            tokens += [first[sequence] + i for i in range(start, start + count)]
            at[sequence] += count
        chunks = {s: rest for s, rest in chunks.items() if rest}
        here = np.array(tokens)
        names = tuple(name for name in NAMES if rng.random() < 0.4)
        rows = some(rng, len(here))
        hidden = some(rng, len(here)) if rng.random() < 0.7 else None
        out = chosen.step(batch, logit_rows=rows, outputs=names, hidden_rows=hidden)
        assert out.logits is not None
        np.testing.assert_array_equal(out.logits, whole.logits[here[rows]])
        for name in names:
            expected = whole.hidden[name][here if hidden is None else here[hidden]]
            np.testing.assert_array_equal(out.hidden[name], expected)


def some(rng: np.random.Generator, count: int) -> np.ndarray:
    """Rows of ``count``, in any order: none, the last, a few or all."""
    kind = rng.integers(4)
    if kind == 0:
        return np.zeros(0, np.int32)
    if kind == 1:
        return np.array([count - 1], np.int32)
    size = count if kind == 2 else int(rng.integers(1, count + 1))
    return rng.permutation(count)[:size].astype(np.int32)


def launch(backend: NativeBackend, step: StepInput) -> StepOutput:
    return backend.launch(step, SampleBatch(sample_rows(step.logit_rows.size))).wait()


def test_what_nobody_wants_costs_nothing(rng: np.random.Generator) -> None:
    """The clock shows which work a step did: none of the tail's for a step that wants no row."""
    backend = NativeBackend(threads=2)
    program = floats(TinyProgram(rng, layers=(CacheSpec(2, 8),)))
    backend.trace(program)
    backend.allocate_cache([2])
    step = plain_step(backend, rng.integers(0, 61, 40))
    with backend.timing() as timing:
        launch(backend, replace(step, logit_rows=np.zeros(0, np.int32)))
    assert "attention" not in worked(timing.busy)
    assert not any(label.startswith("gated") for label in worked(timing.busy))
    with backend.timing() as timing:
        launch(backend, step)
    assert "attention" in worked(timing.busy)


def worked(busy: dict[str, float]) -> set[str]:
    return {label for label, seconds in busy.items() if seconds > 0}


class Odd(TinyProgram):
    """After the last keys are written, tokens are embedded once more."""

    def build(self, graph: Graph) -> None:
        late: Callable[..., Any] = graph.take_rows

        def take_rows(x: Any) -> Any:
            return late(graph.add(x, graph.embed("embed.weight", self.hidden, 0.5)))

        graph.take_rows = take_rows  # type: ignore[method-assign]
        super().build(graph)


@pytest.mark.parametrize("program", [TinyProgram, Odd])
def test_a_program_whose_end_needs_its_tokens_runs_on_all_rows(
    rng: np.random.Generator, seed: int, program: type[TinyProgram]
) -> None:
    backend = NativeBackend(threads=2)
    backend.trace(floats(program(np.random.default_rng(seed))))
    backend.allocate_cache([2] * len(backend.groups))
    step = replace(plain_step(backend, rng.integers(0, 61, 40)), return_logits=True)
    every = launch(backend, replace(step, logit_rows=np.arange(40, dtype=np.int32)))
    few = launch(backend, replace(step, logit_rows=np.array([39, 7], np.int32)))
    assert every.logits is not None
    np.testing.assert_array_equal(few.logits, every.logits[[39, 7]])
