"""The torch backend as its contract sees it: steps in, numpy arrays out, typed errors."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from steppe.backends import sampling_rules
from steppe.backends.base import SampleBatch, StepInput
from steppe.backends.tape import CacheSpec, Graph
from steppe.backends.torch import TorchBackend
from steppe.errors import BackendError, ExecutionError, ModelError
from tests.backends.programs import ArrayWeight, TinyProgram, sample_rows, tokens_of
from tests.backends.resampling import check_resampling
from tests.models.driver import Driver
from tests.models.numpy_backend import NumpyBackend

if TYPE_CHECKING:
    from steppe.backends.base import StepOutput

CPU = torch.device("cpu")
OUTPUTS = ("hidden[0]", "hidden[2]", "hidden[3]", "final_hidden")


def one_sequence(length: int, **fields: Any) -> StepInput:
    """``length`` tokens of one new sequence in pages 0, 1, ... of 16, for two cache groups."""
    pages = np.arange(-(-length // 16), dtype=np.int32)[None]
    step = StepInput(
        token_ids=np.arange(length, dtype=np.int32) % 61,
        positions=np.arange(length, dtype=np.int32),
        query_start=np.array([0, length], np.int32),
        context_len=np.array([length], np.int32),
        block_tables=(pages, pages),
        slot_mappings=(np.arange(length), np.arange(length)),
        logit_rows=np.array([length - 1], np.int32),
    )
    return dataclasses.replace(step, **fields)


def ready(program: TinyProgram, pages: int = 8, **options: Any) -> TorchBackend:
    backend = TorchBackend(page_size=16, **options)
    backend.trace(program)
    backend.allocate_cache([pages] * len(backend.groups))
    return backend


def run(backend: TorchBackend, step: StepInput, **fields: Any) -> StepOutput:
    rows = sample_rows(step.logit_rows.size, **fields)
    return backend.launch(step, SampleBatch(rows)).wait()


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"softcap": 4.0, "tied": True},
        {"experts": 4},
        {"layers": (CacheSpec(4, 8, window=20),) * 3, "inner": 5},
    ],
    ids=["plain", "softcap", "experts", "window"],
)
def test_steps_compute_what_the_numpy_interpreter_says(
    rng: np.random.Generator, seed: int, variant: dict[str, Any]
) -> None:
    drivers = [
        Driver(
            backend,
            TinyProgram(np.random.default_rng(seed), **variant),
            rng,
            sequences=3,
            tokens=200,
        )
        for backend in (TorchBackend(page_size=16), NumpyBackend(page_size=8))
    ]
    for lengths in ({0: 5, 1: 140}, {2: 1, 0: 60, 1: 1}, {1: 1, 2: 40, 0: 2}):
        batch = {s: tokens_of(rng, 61, [n])[0] for s, n in lengths.items()}
        ours, expected = (d.step(batch, all_logits=True, outputs=OUTPUTS) for d in drivers)
        assert ours.logits is not None
        # Random weights of this size make values of ten and more, and amplify roundings.
        np.testing.assert_allclose(ours.logits, expected.logits, atol=2e-3, rtol=1e-3)
        assert tuple(ours.hidden) == OUTPUTS
        for name in OUTPUTS:
            np.testing.assert_allclose(
                ours.hidden[name], expected.hidden[name], atol=2e-3, rtol=1e-3
            )


def test_cache_groups_are_those_of_the_tape(rng: np.random.Generator) -> None:
    backend = ready(TinyProgram(rng))
    assert [group.layers for group in backend.groups] == [(0, 2), (1,)]
    assert backend.page_bytes(0) == 2 * 2 * 16 * 2 * 8 * 4
    assert backend.page_bytes(1) == 2 * 1 * 16 * 1 * 12 * 4
    assert backend.page_size == 16
    assert backend.name == "torch"
    assert backend.capture() is True


def test_groups_have_their_own_pages(rng: np.random.Generator) -> None:
    backend = ready(TinyProgram(rng))
    here = run(backend, one_sequence(20, return_logits=True))
    there = np.array([[7, 3]], np.int32)
    slots = np.concatenate([np.arange(7 * 16, 8 * 16), np.arange(3 * 16, 3 * 16 + 4)])
    step = one_sequence(20, return_logits=True)
    step = dataclasses.replace(
        step,
        block_tables=(step.block_tables[0], there),
        slot_mappings=(step.slot_mappings[0], slots),
    )
    np.testing.assert_array_equal(run(backend, step).logits, here.logits)


def test_only_what_is_asked_for_is_computed(rng: np.random.Generator) -> None:
    program = TinyProgram(rng)
    backend = ready(program)
    counts: Counter[str] = Counter()
    model = backend._model
    assert model is not None
    everything = model.planner.plan((), with_logits=True)
    silent = model.planner.plan((), with_logits=False)
    assert silent.head == ()
    # Without logits nothing after the last layer's keys and values is worth computing.
    graph = Graph(program.layers)
    program.build(graph)
    kinds = {op.out: type(op).__name__ for op in graph.tape().ops if hasattr(op, "out")}
    counts.update(kinds[instruction.out] for instruction in silent.body)
    assert counts["RopeWriteKV"] == 3
    assert counts["PagedAttention"] == 2
    assert counts["GatedActivation"] == 2
    assert len(everything.body) + len(everything.head) == len(kinds)
    first = model.planner.plan(("hidden[0]",), with_logits=False)
    assert [i.out for i in first.body] == [i.out for i in silent.body]


def test_hidden_rows_and_logits_come_only_when_asked(rng: np.random.Generator) -> None:
    backend = ready(TinyProgram(rng))
    bare = run(backend, one_sequence(20))
    assert bare.logits is None
    assert bare.hidden == {}
    assert bare.logprob is None
    every = run(backend, one_sequence(20, outputs=OUTPUTS))
    rows = np.array([19, 3, 3], np.int32)
    some = run(backend, one_sequence(20, outputs=OUTPUTS, hidden_rows=rows))
    for name in OUTPUTS:
        assert every.hidden[name].shape == (20, 24)
        assert every.hidden[name].dtype == np.float32
        np.testing.assert_array_equal(some.hidden[name], every.hidden[name][rows])
    silent = run(
        backend,
        one_sequence(
            20, logit_rows=np.empty(0, np.int32), outputs=("final_hidden",), return_logits=True
        ),
    )
    np.testing.assert_array_equal(silent.hidden["final_hidden"], every.hidden["final_hidden"])
    assert silent.sampled.shape == (0,)
    assert silent.logits is not None
    assert silent.logits.shape == (0, 61)


def test_embeddings_are_unscaled(rng: np.random.Generator) -> None:
    program = TinyProgram(rng)
    backend = ready(program)
    table = program.weights["embed.weight"].array
    np.testing.assert_array_equal(backend.embedding_table(), table)
    hidden = run(backend, one_sequence(3, outputs=("hidden[0]",))).hidden["hidden[0]"]
    np.testing.assert_array_equal(hidden, table[:3] * np.float32(1.5))


def test_chunks_of_logit_rows_make_no_difference(rng: np.random.Generator, seed: int) -> None:
    outs = []
    for most in (3, 64):
        program = TinyProgram(np.random.default_rng(seed))
        backend = ready(program, max_logit_rows=most)
        step = one_sequence(40, logit_rows=np.arange(40, dtype=np.int32), return_logits=True)
        target = np.where(np.arange(40) < 30, (np.arange(40) + 1) % 61, -1)
        asked = np.resize([2, -1, 5, 0], 40)
        out = run(backend, step, target=target, num_logprobs=asked, temperature=1.0, seed=seed)
        outs.append(out)
    first, second = outs
    for name in ("sampled", "logprob", "top_ids", "top_logprobs", "logits"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert first.sampled.dtype == np.int32
    assert first.sampled[:30].tolist() == list(range(1, 31))
    assert first.logits is not None
    expected = sampling_rules.logprobs(first.logits)[np.arange(40), first.sampled]
    assert first.logprob is not None
    np.testing.assert_allclose(first.logprob, np.where(asked >= 0, expected, -np.inf), atol=1e-5)


def test_bfloat16_is_near(rng: np.random.Generator, seed: int) -> None:
    logits = []
    for dtype in ("float32", "bfloat16"):
        backend = ready(TinyProgram(np.random.default_rng(seed)), dtype=dtype)
        out = run(backend, one_sequence(12, return_logits=True)).logits
        assert out is not None
        logits.append(out[0].astype(np.float64))
    a, b = logits
    assert not np.array_equal(a, b)
    assert np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.98


def test_a_tied_head_is_loaded_once(rng: np.random.Generator) -> None:
    program = TinyProgram(rng, tied=True)
    ready(program)
    # The same object under two names.
    assert program.weights["head.weight"].reads == ["embed.weight"]

    class OneName(TinyProgram):
        def build(self, graph: Graph) -> None:
            x = graph.embed("head.weight", self.hidden)
            graph.output("logits", graph.linear(graph.take_rows(x), "head", self.vocab_size))

    shared = OneName(rng, layers=())
    ready(shared)
    assert shared.weights["head.weight"].reads == ["head.weight"]


@pytest.mark.parametrize(
    ("name", "dtype"), [("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16)]
)
@pytest.mark.parametrize("reorder", [False, True])
def test_plain_types_are_read_as_stored(
    rng: np.random.Generator, name: str, dtype: torch.dtype, reorder: bool
) -> None:
    program = TinyProgram(rng)
    wide = program.weights["embed.weight"].array
    stored = torch.from_numpy(wide).to(dtype)
    raw = stored.view(torch.uint8).numpy().reshape(-1).copy()
    raw.setflags(write=False)
    order = rng.permutation(61) if reorder else None
    weight = ArrayWeight("embed.weight", wide, name, raw, order)
    program.weights["embed.weight"] = weight
    table = ready(program).embedding_table()
    expected = stored.float().numpy()
    np.testing.assert_array_equal(table, expected if order is None else expected[order])
    assert weight.reads == []


def test_a_weight_with_something_to_add_is_dequantised(rng: np.random.Generator) -> None:
    program = TinyProgram(rng)
    weight = ArrayWeight("norm.weight", program.weights["norm.weight"].array, "F32", add=1.0)
    program.weights["norm.weight"] = weight
    ready(program)
    assert weight.reads == ["norm.weight"]


def test_parameters_that_do_not_fit_are_named(rng: np.random.Generator) -> None:
    program = TinyProgram(rng)
    del program.weights["layers.1.k.weight"]
    with pytest.raises(ModelError, match=r"layers\.1\.k\.weight"):
        TorchBackend().trace(program)
    program = TinyProgram(rng)
    program.weights["norm.weight"] = ArrayWeight("norm.weight", np.ones(25, np.float32))
    with pytest.raises(ModelError, match=r"norm\.weight.*\(25,\).*\(24,\)"):
        TorchBackend().trace(program)
    program = TinyProgram(rng)
    short = ArrayWeight("norm.weight", np.ones(24, np.float32), "F32", np.zeros(95, np.uint8))
    program.weights["norm.weight"] = short
    with pytest.raises(ModelError, match="95 bytes"):
        TorchBackend().trace(program)


def test_logits_must_come_from_take_rows(rng: np.random.Generator) -> None:
    class NoRows(TinyProgram):
        def build(self, graph: Graph) -> None:
            x = graph.embed("embed.weight", self.hidden)
            graph.output("logits", graph.linear(x, "head", self.vocab_size))

    with pytest.raises(BackendError, match="take_rows"):
        TorchBackend().trace(NoRows(rng, layers=()))


MALFORMED = {
    "token_ids": {"token_ids": np.full(20, 61, np.int32)},
    "positions": {"positions": np.arange(19, dtype=np.int32)},
    "positions outside": {"positions": np.arange(500, 520, dtype=np.int32)},
    "query_start": {"query_start": np.array([0, 19], np.int32)},
    "context_len": {"context_len": np.array([19], np.int32)},
    "too short": {"context_len": np.array([40], np.int32)},
    "cache groups": {"block_tables": (np.zeros((1, 2), np.int32),)},
    "lacks the page": {"block_tables": (np.array([[0, -1]], np.int32),) * 2},
    "outside the cache": {"block_tables": (np.array([[0, 8]], np.int32),) * 2},
    "one slot for each": {"slot_mappings": (np.arange(19),) * 2},
    "slot_mappings": {"slot_mappings": (np.arange(20) + 8 * 16 - 19,) * 2},
    "logit_rows": {"logit_rows": np.array([20], np.int32)},
    "hidden_rows": {"hidden_rows": np.array([-1], np.int32)},
    "no output": {"outputs": ("attention",)},
    "for logit rows only": {"outputs": ("logits",)},
}


@pytest.mark.parametrize("message", MALFORMED)
def test_a_malformed_step_is_refused_before_it_writes(
    rng: np.random.Generator, message: str
) -> None:
    backend = ready(TinyProgram(rng))
    step = one_sequence(20, **MALFORMED[message])
    with pytest.raises(ExecutionError, match=message):
        backend.launch(step, SampleBatch(sample_rows(1)))
    model = backend._model
    assert model is not None
    assert not any(t.data.any() for g in (0, 1) for t in model.cache.layer(g, 0))


def test_samples_must_fit_the_rows(rng: np.random.Generator) -> None:
    backend = ready(TinyProgram(rng))
    for batch in (
        SampleBatch(sample_rows(2)),
        SampleBatch(sample_rows(1), masks=[]),
        SampleBatch(sample_rows(1, target=61)),
    ):
        with pytest.raises(ExecutionError):
            backend.launch(one_sequence(20), batch)


def test_a_fault_of_the_step_is_the_tickets_to_raise(rng: np.random.Generator) -> None:
    backend = ready(TinyProgram(rng))
    bias = (np.array([61], np.int32), np.ones(1, np.float32))
    ticket = backend.launch(one_sequence(20), SampleBatch(sample_rows(1), bias=[bias]))
    with pytest.raises(ExecutionError) as caught:
        ticket.wait()
    assert isinstance(caught.value.__cause__, IndexError)
    run(backend, one_sequence(20))  # and the next one is fine


def test_a_cache_that_does_not_fit_is_a_backend_error(rng: np.random.Generator) -> None:
    backend = TorchBackend()
    with pytest.raises(BackendError, match="traced"):
        backend.allocate_cache([1])
    with pytest.raises(BackendError, match="int4"):
        backend.trace(TinyProgram(rng), kv_dtype="int4")
    backend.trace(TinyProgram(rng))
    with pytest.raises(BackendError, match="allocated"):
        backend.launch(one_sequence(1), SampleBatch(sample_rows(1)))
    with pytest.raises(BackendError, match="pages"):
        backend.allocate_cache([4])
    with pytest.raises(BackendError, match="pages"):
        backend.allocate_cache([2**50, 1])
    with pytest.raises(BackendError, match="already"):
        backend.trace(TinyProgram(rng))


def test_threads_are_the_only_global_thing_that_changes() -> None:
    before = torch.get_num_threads()
    try:
        TorchBackend()
        assert torch.get_num_threads() == before
        TorchBackend(threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert torch.is_grad_enabled()


def test_missing_torch_is_said_with_its_remedy() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from steppe.errors import BackendError\n"
        "from steppe.backends.select import create_backend\n"
        "try: create_backend('torch')\n"
        "except BackendError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install steppe[torch]" in done.stdout


def test_kept_rows_are_sampled_again_as_the_step_would_have(rng: np.random.Generator) -> None:
    backend = ready(TinyProgram(rng), max_logit_rows=16)
    step = one_sequence(20, logit_rows=np.arange(backend.kept_rows, dtype=np.int32))
    check_resampling(backend, step, rng, 7)


def test_what_is_not_kept_or_malformed_is_not_sampled_again(rng: np.random.Generator) -> None:
    backend = ready(TinyProgram(rng), max_logit_rows=4)
    first, one = np.zeros(1, np.int32), SampleBatch(sample_rows(1))
    with pytest.raises(ExecutionError, match="not kept"):
        backend.resample(first, one)
    run(backend, one_sequence(20, logit_rows=np.arange(3, dtype=np.int32)))
    assert backend.resample(first + 2, one).sampled[0] >= 0
    for row in (-1, 3):
        with pytest.raises(ExecutionError, match="not kept"):
            backend.resample(first + np.int32(row), one)
    for batch in (
        SampleBatch(sample_rows(2)),
        SampleBatch(sample_rows(1, target=61)),
        SampleBatch(sample_rows(1), masks=[]),
    ):
        with pytest.raises(ExecutionError, match="malformed"):
            backend.resample(first, batch)
    run(backend, one_sequence(20, logit_rows=np.arange(5, dtype=np.int32)))
    with pytest.raises(ExecutionError, match="not kept"):
        backend.resample(first, one)
