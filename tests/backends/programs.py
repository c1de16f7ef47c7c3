"""Small programs over random weights, and steps for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from steppe.backends.base import SAMPLE_ROW
from steppe.backends.tape import CacheSpec, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from steppe.backends.tape import Graph


@dataclass(frozen=True)
class ArrayWeight:
    """A parameter that is an array; counts how often it is dequantised."""

    name: str
    array: NDArray[np.float32]
    dtype: str = "Q8_0"
    raw: NDArray[np.uint8] | None = None
    row_order: NDArray[np.int64] | None = None
    add: float = 0.0
    reads: list[str] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def data(self) -> NDArray[np.uint8]:
        assert self.raw is not None, "this weight can only be dequantised"
        return self.raw

    def dequantize(self) -> NDArray[np.float32]:
        self.reads.append(self.name)
        return self.array.copy()

    def release(self) -> None:
        """Nothing is mapped."""


@dataclass
class TinyProgram:
    """A decoder with one cache spec per layer; the last width is odd on purpose."""

    rng: np.random.Generator
    layers: tuple[CacheSpec, ...] = (CacheSpec(2, 8), CacheSpec(1, 12, window=5), CacheSpec(2, 8))
    heads: int = 4
    hidden: int = 24
    inner: int = 37
    vocab_size: int = 61
    max_positions: int = 512
    softcap: float | None = None
    experts: int = 0
    tied: bool = False
    name: str = "tiny"
    weights: dict[str, ArrayWeight] = field(default_factory=dict)

    def build(self, graph: Graph) -> None:
        x = graph.embed("embed.weight", self.hidden, 1.5)
        for number, spec in enumerate(self.layers):
            graph.output(f"hidden[{number}]", x)
            site = f"layers.{number}"
            width = spec.num_kv_heads * spec.head_dim
            y = graph.rms_norm(x, f"{site}.norm.weight", 1e-6)
            q = graph.linear(y, f"{site}.q", self.heads * spec.head_dim, bias=True)
            q = graph.rms_norm(q, f"{site}.q_norm.weight", 1e-6, heads=self.heads)
            k = graph.linear(y, f"{site}.k", width)
            v = graph.linear(y, f"{site}.v", width)
            # A part of the head only, so that the rest must pass unrotated.
            rope = RopeSpec(1e4 ** -np.linspace(0, 1, spec.head_dim // 4, dtype=np.float32))
            q = graph.rope_write_kv(q, k, v, number, rope)
            scale = spec.head_dim**-0.5
            y = graph.paged_attention(q, number, self.heads, scale, self.softcap)
            x = graph.add(x, graph.linear(y, f"{site}.o", self.hidden))
            y = graph.rms_norm(x, f"{site}.norm2.weight", 1e-6)
            if self.experts:
                y = graph.mixture_of_experts(
                    y,
                    f"{site}.moe",
                    num_experts=self.experts,
                    top_k=2,
                    expert_width=self.inner,
                    normalize=True,
                    activation="silu",
                )
            else:
                gate = graph.linear(y, f"{site}.gate", self.inner)
                up = graph.linear(y, f"{site}.up", self.inner)
                y = graph.gated_activation(gate, up, "gelu_tanh" if number % 2 else "silu")
                y = graph.linear(y, f"{site}.down", self.hidden)
            x = graph.add(x, y)
        graph.output(f"hidden[{len(self.layers)}]", x)
        x = graph.rms_norm(x, "norm.weight", 1e-6)
        graph.output("final_hidden", x)
        logits = graph.linear(graph.take_rows(x), "head", self.vocab_size)
        if self.softcap is not None:
            logits = graph.softcap(logits, self.softcap)
        graph.output("logits", logits)

    def __post_init__(self) -> None:
        hidden, inner = self.hidden, self.inner
        self._weight("embed.weight", self.vocab_size, hidden)
        self._weight("norm.weight", hidden)
        if self.tied:
            self.weights["head.weight"] = self.weights["embed.weight"]
        else:
            self._weight("head.weight", self.vocab_size, hidden)
        for number, spec in enumerate(self.layers):
            site = f"layers.{number}"
            width = spec.num_kv_heads * spec.head_dim
            self._weight(f"{site}.norm.weight", hidden)
            self._weight(f"{site}.norm2.weight", hidden)
            self._weight(f"{site}.q.weight", self.heads * spec.head_dim, hidden)
            self._weight(f"{site}.q.bias", self.heads * spec.head_dim)
            self._weight(f"{site}.q_norm.weight", spec.head_dim)
            self._weight(f"{site}.k.weight", width, hidden)
            self._weight(f"{site}.v.weight", width, hidden)
            self._weight(f"{site}.o.weight", hidden, self.heads * spec.head_dim)
            parts = [f"{site}.{{}}"]
            if self.experts:
                self._weight(f"{site}.moe.gate.weight", self.experts, hidden)
                parts = [f"{site}.moe.experts.{e}.{{}}_proj" for e in range(self.experts)]
            for part in parts:
                self._weight(f"{part.format('gate')}.weight", inner, hidden)
                self._weight(f"{part.format('up')}.weight", inner, hidden)
                self._weight(f"{part.format('down')}.weight", hidden, inner)

    def _weight(self, name: str, *shape: int) -> None:
        scale = 0.5 if len(shape) > 1 else 1.0
        array = (self.rng.standard_normal(shape) * scale).astype(np.float32)
        self.weights[name] = ArrayWeight(name, array)


def sample_rows(count: int, **fields: object) -> NDArray[np.void]:
    """Rows that sample greedily and report nothing, but for ``fields``."""
    rows = np.zeros(count, SAMPLE_ROW)
    rows["num_logprobs"] = -1
    rows["target"] = -1
    rows["top_p"] = rows["repetition_penalty"] = 1.0
    for name, value in fields.items():
        rows[name] = value
    return rows


def cut(rng: np.random.Generator, length: int, most: int) -> list[int]:
    """Random sizes from 1 to ``most`` that add up to ``length``."""
    sizes = []
    while length:
        sizes.append(min(length, int(rng.integers(1, most + 1))))
        length -= sizes[-1]
    return sizes


def tokens_of(rng: np.random.Generator, vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random token ids."""
    return [rng.integers(0, vocab, length).tolist() for length in lengths]
