"""Whole steps of the native backend against the torch reference, and its guarantees."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.backends import sampling_rules as rules
from steppe.backends.base import History, SampleBatch, StepInput
from steppe.backends.tape import CacheSpec
from steppe.backends.torch import TorchBackend
from steppe.errors import BackendError, ExecutionError, ModelError
from steppe.formats.dequant import dequantize
from tests.backends.programs import ArrayWeight, TinyProgram, cut, sample_rows, tokens_of
from tests.backends.resampling import check_resampling
from tests.models.driver import Driver
from tests.native.built import VARIANTS, NativeBackend

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "capped and tied": {"softcap": 5.0, "tied": True},
    "one kv head": {"layers": (CacheSpec(1, 34), CacheSpec(1, 34, window=70)), "heads": 5},
    "no sharing": {"layers": (CacheSpec(4, 64), CacheSpec(4, 64, window=3)), "hidden": 65},
    "wide heads": {"layers": (CacheSpec(2, 256),), "inner": 7},
    "experts": {"experts": 3},
    "many queries": {"layers": (CacheSpec(1, 32),), "heads": 50},
    "odd heads": {"layers": (CacheSpec(2, 33), CacheSpec(2, 33, window=50))},
    "very wide heads": {"layers": (CacheSpec(1, 601),), "heads": 2},
}


def floats(program: TinyProgram) -> TinyProgram:
    """Its parameters in a type that the backend can only dequantise: it computes in float32."""
    shared: dict[int, ArrayWeight] = {}
    for name, weight in program.weights.items():
        program.weights[name] = shared.setdefault(id(weight), replace(weight, dtype="other"))
    return program


def quantised(
    program: TinyProgram, rng: np.random.Generator, dtype: str, sites: tuple[str, ...] = ("",)
) -> TinyProgram:
    """Every matrix in a stored type, or those of some sites."""
    for name, weight in program.weights.items():
        if weight.array.ndim == 1 or not any(site in name for site in sites):
            program.weights[name] = replace(weight, dtype="other")
            continue
        values = (rng.standard_normal(weight.shape) / 8).astype(np.float32)
        kind = gguf.GGMLQuantizationType[dtype]
        raw = np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(-1)
        array = dequantize(dtype, raw, weight.shape)
        program.weights[name] = ArrayWeight(name, array, dtype, raw)
    return program


def relative(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))


def typical(ours: np.ndarray, expected: np.ndarray) -> float:
    """Relative error of the better rows: in a mixture, rounding gives others another expert.

    A quarter of the rows, since a step of four may well have two near ties.
    """
    errors = np.linalg.norm(ours - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return float(np.quantile(errors, 0.25, method="lower"))


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_agree_with_the_reference(
    rng: np.random.Generator, seed: int, isa: str, shape: str
) -> None:
    """float32 weights: what differs is bfloat16 in the cache, the queries and the probabilities."""
    programs = [floats(TinyProgram(np.random.default_rng(seed), **SHAPES[shape])) for _ in range(2)]
    names = (*(f"hidden[{i}]" for i in range(len(programs[0].layers) + 1)), "final_hidden")
    prompts = dict(enumerate(tokens_of(rng, 61, (150, 1, 7, 64, 65))))
    outs = []
    for backend, program in zip(
        (NativeBackend(isa=isa, threads=2), TorchBackend(threads=1)), programs, strict=True
    ):
        driver = Driver(backend, program, rng, sequences=5, tokens=160)
        first = driver.step(prompts, all_logits=True, outputs=names)
        outs.append((first, driver.step({0: [1], 3: [2, 3], 1: [4]}, outputs=names)))
    error = typical if programs[0].experts else relative
    for ours, expected in zip(*outs, strict=True):
        np.testing.assert_array_equal(ours.hidden["hidden[0]"], expected.hidden["hidden[0]"])
        for name in names[1:]:
            assert error(ours.hidden[name], expected.hidden[name]) < 0.06, name
        assert ours.logits is not None
        assert expected.logits is not None
        assert error(ours.logits, expected.logits) < 0.06
        np.testing.assert_array_equal(ours.sampled, ours.logits.argmax(axis=1))


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize(("kv_dtype", "bound"), [("float16", 1e-3), ("int8", 5e-3)])
def test_the_same_cache_in_both_backends_gives_the_same(
    rng: np.random.Generator, seed: int, isa: str, kv_dtype: str, bound: float
) -> None:
    """float32 everywhere else. Where a value lies between two quants, either backend may be off by
    one: so int8 is bounded less tightly than rounding alone would ask.
    """
    prompts = dict(enumerate(tokens_of(rng, 61, (150, 1, 70))))
    outs = []
    for backend in (NativeBackend(isa=isa, threads=2), TorchBackend(threads=1)):
        program = TinyProgram(
            np.random.default_rng(seed), layers=(CacheSpec(2, 64), CacheSpec(2, 64, window=40))
        )
        driver = Driver(backend, floats(program), rng, sequences=3, tokens=160, kv_dtype=kv_dtype)
        driver.step(prompts)
        outs.append(driver.step({0: [1], 2: [2, 3], 1: [4]}, all_logits=True).logits)
    assert relative(outs[0], outs[1]) < bound


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_quantised_steps_agree_with_the_reference(
    rng: np.random.Generator, seed: int, isa: str, dtype: str
) -> None:
    outs = []
    for backend in (NativeBackend(isa=isa, threads=2), TorchBackend(threads=1)):
        weights = np.random.default_rng(seed)
        program = TinyProgram(
            weights, layers=(CacheSpec(2, 64),) * 2, hidden=256, inner=512, tied=True
        )
        driver = Driver(backend, quantised(program, weights, dtype), rng, sequences=2, tokens=80)
        prompts = dict(enumerate(tokens_of(np.random.default_rng(seed), 61, (70, 9))))
        outs.append(driver.step(prompts, all_logits=True).logits)
    assert relative(outs[0], outs[1]) < 0.15


VARIED = st.sampled_from(["F32", "Q4_1", "BF16", "Q8_0"])


@settings(max_examples=20)
@given(data=st.data())
def test_bits_do_not_depend_on_company_chunks_pages_or_threads(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    dtype, isa = data.draw(VARIED), data.draw(st.sampled_from(VARIANTS))
    kv_dtype = data.draw(st.sampled_from(["bfloat16", "float16", "int8"]))
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 140, 4).tolist()
    # Matrices of an odd and of an even number of column blocks, and a last one that is not whole.
    vocab = data.draw(st.sampled_from([61, 45, 16]))
    prompts = tokens_of(rng, vocab, lengths)

    def driver(threads: int) -> Driver:
        weights = np.random.default_rng(seed)
        program = TinyProgram(
            weights,
            layers=(CacheSpec(2, 32), CacheSpec(2, 32, window=40)),
            hidden=64,
            inner=96,
            vocab_size=vocab,
            softcap=9.0,
        )
        program = floats(program) if dtype == "F32" else quantised(program, weights, dtype)
        backend = NativeBackend(threads=threads, isa=isa)
        return Driver(backend, program, rng, sequences=4, tokens=140, kv_dtype=kv_dtype)

    together = driver(data.draw(st.integers(1, 3)))
    whole = together.step(dict(enumerate(prompts)), all_logits=True).logits
    assert whole is not None
    ends = np.cumsum(lengths)
    for number in range(4):
        alone = driver(data.draw(st.integers(1, 3)))
        parts = []
        at = 0
        for size in cut(rng, lengths[number], data.draw(st.sampled_from([1, 5, 64, 140]))):
            chunk = prompts[number][at : at + size]
            parts.append(alone.step({0: chunk}, all_logits=True).logits)
            at += size
        expected = whole[ends[number] - lengths[number] : ends[number]]
        np.testing.assert_array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("inner", [7, 47, 80, 128])
def test_a_gated_row_alone_has_its_bits_at_every_width(
    rng: np.random.Generator, seed: int, isa: str, dtype: str, inner: int
) -> None:
    """Groups of columns that are read side by side need not be whole, nor of an even number."""
    tokens = rng.integers(0, 61, 9).tolist()
    program = TinyProgram(rng, layers=(CacheSpec(1, 8),), hidden=64, inner=inner)
    program = quantised(program, rng, dtype, (".gate", ".up"))
    outs = []
    for size in (9, 2, 1):
        backend = NativeBackend(threads=2, isa=isa)
        driver = Driver(backend, program, np.random.default_rng(seed), sequences=1, tokens=16)
        steps = (tokens[at : at + size] for at in range(0, len(tokens), size))
        outs.append(np.concatenate([driver.step({0: s}, all_logits=True).logits for s in steps]))
    np.testing.assert_array_equal(outs[1], outs[0])
    np.testing.assert_array_equal(outs[2], outs[0])


def test_rows_are_sampled_by_their_own_rules(rng: np.random.Generator) -> None:
    """More rows than logits exist at once, each with something else."""
    program = floats(TinyProgram(rng))
    backend = NativeBackend(threads=2)
    backend.trace(program)
    backend.allocate_cache([4] * len(backend.groups))
    count = 150
    step = plain_step(backend, rng.integers(0, 61, count))
    step = replace(step, logit_rows=np.arange(count, dtype=np.int32), return_logits=True)
    rows = sample_rows(
        count,
        temperature=rng.choice([0.0, 1.0], count),
        top_p=rng.choice([1.0, 0.8], count),
        top_k=rng.choice([0, 9], count),
        seed=rng.integers(0, 2**63, count),
        num_logprobs=rng.integers(-1, 4, count),
        target=rng.choice([-1, -1, 5], count),
        repetition_penalty=1.4,
    )

    def ids() -> np.ndarray:
        return rng.choice(61, 7, replace=False).astype(np.int32)

    batch = SampleBatch(
        rows,
        bias=[(ids(), np.ones(7, np.float32)) if i % 3 else None for i in range(count)],
        history=[History(ids(), np.ones(7, np.int32), np.zeros(7, np.bool_))] * count,
        banned=[ids() if i % 2 else None for i in range(count)],
        masks=[
            np.array([2**32 - 1, 2**20], np.uint32) if i % 5 == 0 else None for i in range(count)
        ],
    )
    out = backend.launch(step, batch).wait()
    assert out.logits is not None
    expected = rules.sample_rows(out.logits, batch)
    np.testing.assert_array_equal(out.sampled, expected.sampled)
    np.testing.assert_array_equal(out.top_ids, expected.top_ids)
    np.testing.assert_allclose(out.logprob, expected.logprob, atol=1e-5)
    np.testing.assert_allclose(out.top_logprobs, expected.top_logprobs, atol=1e-5)


def test_kept_rows_are_sampled_again_as_the_step_would_have(rng: np.random.Generator) -> None:
    program = floats(TinyProgram(rng))
    backend = NativeBackend(threads=2)
    backend.trace(program)
    backend.allocate_cache([4] * len(backend.groups))
    count = backend.kept_rows
    step = plain_step(backend, rng.integers(0, 61, count))
    step = replace(step, logit_rows=np.arange(count, dtype=np.int32))
    check_resampling(backend, step, rng, 20)


def test_what_is_not_kept_or_malformed_is_not_sampled_again(rng: np.random.Generator) -> None:
    program = floats(TinyProgram(rng))
    backend = NativeBackend(threads=1)
    backend.trace(program)
    backend.allocate_cache([4] * len(backend.groups))
    first = np.zeros(1, np.int32)
    one = SampleBatch(sample_rows(1))
    with pytest.raises(ExecutionError, match="not kept"):
        backend.resample(first, one)
    step = plain_step(backend, rng.integers(0, 61, 70))
    backend.launch(
        replace(step, logit_rows=np.arange(3, dtype=np.int32)), SampleBatch(sample_rows(3))
    ).wait()
    assert backend.resample(first + 2, one).sampled[0] >= 0
    for row in (-1, 3):
        with pytest.raises(ExecutionError, match="not kept"):
            backend.resample(first + np.int32(row), one)
    for batch in (
        SampleBatch(sample_rows(2)),
        SampleBatch(sample_rows(1, target=61)),
        SampleBatch(sample_rows(1), masks=[]),
        SampleBatch(sample_rows(1), banned=[np.array([61], np.int32)]),
        SampleBatch(sample_rows(1), masks=[np.zeros(1, np.uint32)]),
    ):
        with pytest.raises(ExecutionError, match="malformed"):
            backend.resample(first, batch)
    whole = replace(step, logit_rows=np.arange(70, dtype=np.int32))
    backend.launch(whole, SampleBatch(sample_rows(70))).wait()
    with pytest.raises(ExecutionError, match="not kept"):
        backend.resample(first, one)


def test_a_step_without_logits_writes_the_cache(rng: np.random.Generator, seed: int) -> None:
    drivers = [
        Driver(
            NativeBackend(threads=1),
            floats(TinyProgram(np.random.default_rng(seed))),
            np.random.default_rng(seed),
            sequences=1,
            tokens=64,
        )
        for _ in range(2)
    ]
    tokens = rng.integers(0, 61, 20)
    whole = drivers[0].step({0: tokens.tolist()}).logits
    backend = drivers[1].backend
    first = plain_step(backend, tokens[:13])
    tables = tuple(
        np.array([[drivers[1]._free[g][-1]]], np.int32) for g in range(len(first.block_tables))
    )
    first = replace(
        first,
        logit_rows=np.empty(0, np.int32),
        block_tables=tables,
        slot_mappings=tuple(t[0, 0] * 64 + np.arange(13) for t in tables),
    )
    assert backend.launch(first, SampleBatch(sample_rows(0))).wait().sampled.size == 0
    drivers[1]._length[0] = 13
    drivers[1]._tables[0] = [[free.pop()] for free in drivers[1]._free]
    np.testing.assert_array_equal(drivers[1].step({0: tokens[13:].tolist()}).logits, whole)


def plain_step(backend: Any, tokens: np.ndarray) -> StepInput:
    """One sequence from its start, on the first pages, with logits of its last token."""
    count = len(tokens)
    pages = -(-count // 64)
    groups = range(len(backend.groups))
    return StepInput(
        token_ids=np.asarray(tokens, np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_start=np.array([0, count], np.int32),
        context_len=np.array([count], np.int32),
        block_tables=tuple(np.arange(pages, dtype=np.int32)[None] for _ in groups),
        slot_mappings=tuple(np.arange(count, dtype=np.int64) for _ in groups),
        logit_rows=np.array([count - 1], np.int32),
    )


def changed(array: np.ndarray, at: int | tuple[int, ...], value: int) -> np.ndarray:
    out = array.copy()
    out[at] = value
    return out


@pytest.mark.parametrize("isa", VARIANTS)
def test_a_page_keeps_nothing_of_its_last_owner(
    rng: np.random.Generator, seed: int, isa: str
) -> None:
    """What one sequence left behind, even if it was not finite, does not reach the next one."""
    program = floats(TinyProgram(rng, layers=(CacheSpec(2, 32), CacheSpec(2, 32, window=40))))
    program.weights["embed.weight"].array[5] = np.nan
    backend = NativeBackend(threads=2, isa=isa)
    backend.trace(program)
    backend.allocate_cache([2] * len(backend.groups))
    tokens = rng.integers(6, 61, int(rng.integers(1, 128)))
    step = replace(plain_step(backend, tokens), return_logits=True)
    before = backend.launch(step, SampleBatch(sample_rows(1))).wait().logits
    assert np.isfinite(before).all()
    poison = replace(plain_step(backend, np.full(128, 5)), return_logits=True)
    assert np.isnan(backend.launch(poison, SampleBatch(sample_rows(1))).wait().logits).all()
    after = backend.launch(step, SampleBatch(sample_rows(1))).wait().logits
    np.testing.assert_array_equal(after, before)


MALFORMED: dict[str, Callable[[StepInput], StepInput]] = {
    "vocabulary": lambda s: replace(s, token_ids=changed(s.token_ids, 3, 61)),
    "negative token": lambda s: replace(s, token_ids=changed(s.token_ids, 3, -1)),
    "position": lambda s: replace(s, positions=changed(s.positions, 3, 512)),
    "short positions": lambda s: replace(s, positions=s.positions[:-1]),
    "query start": lambda s: replace(s, query_start=np.array([0, 9], np.int32)),
    "falling query start": lambda s: replace(
        s,
        query_start=np.array([0, 20, 10], np.int32),
        context_len=np.array([20, 20], np.int32),
        block_tables=tuple(np.zeros((2, 1), np.int32) for _ in s.block_tables),
    ),
    "context": lambda s: replace(s, context_len=np.array([9], np.int32)),
    "long context": lambda s: replace(s, context_len=np.array([65], np.int32)),
    "huge context": lambda s: replace(s, context_len=np.array([2**31 - 1], np.int32)),
    "no page": lambda s: replace(s, block_tables=tuple(t - 1 for t in s.block_tables)),
    "wrong page": lambda s: replace(s, block_tables=tuple(t + 2 for t in s.block_tables)),
    "too few groups": lambda s: replace(s, block_tables=s.block_tables[:1]),
    "slot": lambda s: replace(s, slot_mappings=tuple(x + 128 for x in s.slot_mappings)),
    "negative slot": lambda s: replace(s, slot_mappings=tuple(x - 1 for x in s.slot_mappings)),
    "few slots": lambda s: replace(s, slot_mappings=tuple(x[1:] for x in s.slot_mappings)),
    "logit row": lambda s: replace(s, logit_rows=np.array([20], np.int32)),
    "hidden row": lambda s: replace(s, hidden_rows=np.array([-1], np.int32)),
    "output": lambda s: replace(s, outputs=("nonsense",)),
    "logits as output": lambda s: replace(s, outputs=("logits",)),
    "empty": lambda s: replace(s, token_ids=s.token_ids[:0], positions=s.positions[:0]),
    "two-dimensional": lambda s: replace(s, token_ids=s.token_ids[None]),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_step_is_an_error(rng: np.random.Generator, fault: str) -> None:
    backend = NativeBackend(threads=1)
    backend.trace(floats(TinyProgram(rng)))
    backend.allocate_cache([2] * len(backend.groups))
    step = plain_step(backend, rng.integers(0, 61, 20))
    batch = SampleBatch(sample_rows(1))
    with pytest.raises(ExecutionError):
        backend.launch(MALFORMED[fault](step), batch).wait()
    assert backend.launch(step, batch).wait().sampled.size == 1


@pytest.mark.parametrize(
    "batch",
    [
        SampleBatch(sample_rows(2)),
        SampleBatch(sample_rows(1, target=61)),
        SampleBatch(sample_rows(1), banned=[]),
        SampleBatch(sample_rows(1), banned=[np.array([61], np.int32)]),
        SampleBatch(sample_rows(1), masks=[np.zeros(1, np.uint32)]),
        SampleBatch(sample_rows(1), bias=[(np.zeros(2, np.int32), np.zeros(1, np.float32))]),
        SampleBatch(
            sample_rows(1),
            history=[History(np.array([-1], np.int32), np.ones(1, np.int32), np.ones(1, np.bool_))],
        ),
    ],
)
def test_a_malformed_sample_batch_is_an_error(rng: np.random.Generator, batch: SampleBatch) -> None:
    backend = NativeBackend(threads=1)
    backend.trace(floats(TinyProgram(rng)))
    backend.allocate_cache([2] * len(backend.groups))
    with pytest.raises(ExecutionError):
        backend.launch(plain_step(backend, rng.integers(0, 61, 20)), batch).wait()


def test_what_cannot_run_is_refused(rng: np.random.Generator) -> None:
    with pytest.raises(BackendError, match="traced"):
        NativeBackend().allocate_cache([1])
    with pytest.raises(BackendError, match="choose"):
        NativeBackend(isa="mmx")
    with pytest.raises(BackendError, match="1024"):
        NativeBackend().trace(floats(TinyProgram(rng, layers=(CacheSpec(1, 1025),))))
    with pytest.raises(BackendError, match="float32"):
        NativeBackend().trace(floats(TinyProgram(rng)), kv_dtype="float32")
    lacking = floats(TinyProgram(rng))
    del lacking.weights["layers.1.o.weight"]
    with pytest.raises(ModelError, match=r"layers\.1\.o\.weight"):
        NativeBackend().trace(lacking)
    backend = NativeBackend()
    backend.trace(floats(TinyProgram(rng)))
    with pytest.raises(BackendError, match="already"):
        backend.trace(floats(TinyProgram(rng)))
    with pytest.raises(BackendError, match="pages"):
        backend.allocate_cache([1])
    with pytest.raises(ExecutionError, match="cache"):
        backend.launch(plain_step(backend, np.zeros(3)), SampleBatch(sample_rows(1)))


def test_sizes_and_the_embedding_table(rng: np.random.Generator) -> None:
    program = floats(TinyProgram(rng))
    backend = NativeBackend(threads=1)
    backend.trace(program)
    np.testing.assert_array_equal(backend.embedding_table(), program.weights["embed.weight"].array)
    assert backend.capture()
    assert backend.page_size == 64
    # bfloat16 keys and values of two layers, values padded to 16 dimensions.
    assert backend.page_bytes(0) == 2 * 64 * 2 * (8 + 16) * 2
    # int8, and a float32 scale of each token's key and value.
    small = NativeBackend(threads=1)
    small.trace(floats(TinyProgram(rng)), kv_dtype="int8")
    assert small.page_bytes(0) == 2 * 64 * 2 * (8 + 16 + 4 + 4)
    assert backend.weight_bytes > sum(
        w.array.nbytes for w in program.weights.values() if w.array.ndim == 2
    )


def test_the_clock_tells_where_the_time_of_steps_goes(rng: np.random.Generator) -> None:
    program = floats(TinyProgram(rng))
    backend = NativeBackend(threads=2)
    driver = Driver(backend, program, rng, sequences=1, tokens=80)
    driver.step({0: [1, 2, 3]})
    with backend.timing() as timing:
        driver.step({0: [4]})
        driver.step({0: [5]})
    driver.step({0: [6]})
    assert timing.steps == 2
    assert {"attention", "rows", "sampling"} < set(timing.busy)
    assert any(label.startswith("gated ") for label in timing.busy)
    assert all(seconds > 0 for seconds in timing.busy.values())
    assert 0 < sum(timing.busy.values()) <= 2 * timing.wall


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_decode_multiplies_by_is_read_and_left_alone(
    rng: np.random.Generator, tied: bool
) -> None:
    shape = TinyProgram(rng, layers=(CacheSpec(2, 8),) * 2, hidden=32, inner=32, tied=tied)
    program = quantised(shape, rng, "Q8_0")
    backend = NativeBackend(threads=2)
    driver = Driver(backend, program, rng, sequences=2, tokens=80)
    first = driver.step({0: [1, 2, 3]}, all_logits=True).logits
    # The embeddings are rows that are looked up; tied ones are the head's.
    packed = sum(
        -(-weight.shape[0] // 16) * -(-weight.shape[1] // 64) * 1088
        for name, weight in program.weights.items()
        if len(weight.shape) == 2 and name != "embed.weight"
    )
    assert backend.read_weights() == packed
    np.testing.assert_array_equal(driver.step({1: [1, 2, 3]}, all_logits=True).logits, first)
