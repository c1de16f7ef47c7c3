"""Grouped experts: each row gets what its own experts say, to the bit, in any company."""

from __future__ import annotations

from dataclasses import dataclass, field

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.backends.tape import CacheSpec, Graph
from steppe.errors import BackendError
from steppe.formats.dequant import dequantize
from tests.backends.programs import ArrayWeight
from tests.models.driver import Driver
from tests.native.built import VARIANTS, NativeBackend

VOCAB = 97


@dataclass
class Mixture:
    """Embedding, one mixture, and a head that nobody looks at."""

    seed: int
    experts: int = 5
    top_k: int = 2
    width: int = 40
    inner: int = 37
    dtype: str = "other"
    normalize: bool = True
    odd: str = ""
    layers: tuple[CacheSpec, ...] = (CacheSpec(1, 2),)
    vocab_size: int = VOCAB
    max_positions: int = 512
    name: str = "mixture"
    weights: dict[str, ArrayWeight] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self._weight(rng, "embed.weight", VOCAB, self.width, dtype="other", scale=2.0)
        self._weight(rng, "head.weight", VOCAB, self.width, dtype="other")
        self._weight(rng, "moe.gate.weight", self.experts, self.width, dtype="other", scale=0.5)
        for e in range(self.experts):
            site = f"moe.experts.{e}"
            kind = self.odd if self.odd and e == self.experts - 1 else self.dtype
            self._weight(rng, f"{site}.gate_proj.weight", self.inner, self.width, dtype=kind)
            self._weight(rng, f"{site}.up_proj.weight", self.inner, self.width, dtype=kind)
            self._weight(rng, f"{site}.down_proj.weight", self.width, self.inner, dtype=kind)

    def _weight(
        self, rng: np.random.Generator, name: str, *shape: int, dtype: str, scale: float = 0.2
    ) -> None:
        array = (rng.standard_normal(shape) * scale).astype(np.float32)
        raw = None
        if dtype != "other":
            kind = gguf.GGMLQuantizationType[dtype]
            blocks = np.ascontiguousarray(gguf.quants.quantize(array, kind))
            raw = blocks.view(np.uint8).reshape(-1)
            array = dequantize(dtype, raw, shape)
        self.weights[name] = ArrayWeight(name, array, dtype, raw)

    def build(self, graph: Graph) -> None:
        x = graph.embed("embed.weight", self.width, 1.0)
        y = graph.mixture_of_experts(
            x,
            "moe",
            num_experts=self.experts,
            top_k=self.top_k,
            expert_width=self.inner,
            normalize=self.normalize,
            activation="silu",
        )
        graph.output("mixture", y)
        graph.output("logits", graph.linear(graph.take_rows(y), "head", VOCAB))

    def expected(self, tokens: np.ndarray) -> np.ndarray:
        """The mixture in numpy, float64, row by row and expert by expert."""
        weight = {name: each.array.astype(np.float64) for name, each in self.weights.items()}
        out = np.zeros((len(tokens), self.width))
        for row, x in enumerate(weight["embed.weight"][tokens]):
            logits = weight["moe.gate.weight"] @ x
            chances = np.exp(logits - logits.max())
            chances /= chances.sum()
            chosen = np.argsort(-chances)[: self.top_k]
            total = chances[chosen].sum() if self.normalize else 1.0
            for e in chosen:
                gate = weight[f"moe.experts.{e}.gate_proj.weight"] @ x
                up = weight[f"moe.experts.{e}.up_proj.weight"] @ x
                inner = gate / (1 + np.exp(-gate)) * up
                down = weight[f"moe.experts.{e}.down_proj.weight"] @ inner
                out[row] += chances[e] / total * down
        return out


def mixed(program: Mixture, batch: dict[int, list[int]], isa: str | None, threads: int) -> list:
    """The mixture's rows, sequence by sequence."""
    backend = NativeBackend(isa=isa, threads=threads)
    driver = Driver(
        backend, program, np.random.default_rng(0), sequences=max(batch) + 1, tokens=256
    )
    out = driver.step(batch, outputs=("mixture",)).hidden["mixture"]
    return np.split(out, np.cumsum([len(tokens) for tokens in batch.values()])[:-1])


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ({}, 1),
        ({}, 73),
        ({"experts": 1, "top_k": 1}, 9),
        ({"experts": 19, "top_k": 19, "normalize": False}, 17),
        ({"experts": 33, "top_k": 6, "width": 96, "inner": 64}, 200),
    ],
)
def test_rows_are_those_of_the_statement(
    rng: np.random.Generator, seed: int, isa: str, shape: dict, rows: int
) -> None:
    program = Mixture(seed, **shape)
    tokens = rng.integers(0, VOCAB, rows)
    (ours,) = mixed(program, {0: tokens.tolist()}, isa, 2)
    expected = program.expected(tokens)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["Q4_1", "Q8_0", "Q4_0"])
def test_quantised_experts_are_near_the_statement(
    rng: np.random.Generator, seed: int, dtype: str
) -> None:
    """Activations are rounded to eight bits, twice; the router and the choice are exact."""
    program = Mixture(seed, experts=7, top_k=3, width=64, inner=96, dtype=dtype)
    tokens = rng.integers(0, VOCAB, 90)
    (ours,) = mixed(program, {0: tokens.tolist()}, None, 2)
    expected = program.expected(tokens)
    assert np.linalg.norm(ours - expected) < 0.03 * np.linalg.norm(expected)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["other", "Q4_1", "Q8_0"]),
    experts=st.integers(2, 20),
    company=st.lists(st.integers(1, 40), max_size=5),
    length=st.integers(1, 30),
    isa=st.sampled_from(VARIANTS),
    data=st.data(),
)
def test_company_changes_no_bit(
    seed: int,
    dtype: str,
    experts: int,
    company: list[int],
    length: int,
    isa: str,
    data: st.DataObject,
) -> None:
    top_k = data.draw(st.integers(1, min(4, experts)))
    program = Mixture(seed, experts, top_k, width=64, inner=32, dtype=dtype)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, length).tolist()
    (alone,) = mixed(program, {0: tokens}, isa, 1)
    singly = [mixed(program, {0: [token]}, isa, 2)[0][0] for token in tokens[:3]]
    batch = {i + 1: rng.integers(0, VOCAB, n).tolist() for i, n in enumerate(company)}
    place = data.draw(st.integers(0, len(company)))
    order = [*list(batch)[:place], 0, *list(batch)[place:]]
    crowd = mixed(program, {i: batch.get(i, tokens) for i in order}, isa, 2)[place]
    np.testing.assert_array_equal(crowd, alone)
    np.testing.assert_array_equal(alone[:3], singly)


def test_experts_of_different_kinds_are_refused(seed: int) -> None:
    program = Mixture(seed, width=64, inner=64, dtype="Q8_0", odd="F32")
    with pytest.raises(BackendError, match="different kinds of types"):
        NativeBackend().trace(program)
