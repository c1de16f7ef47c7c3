"""A backend in plain numpy: what the tape means, said as directly as we can.

It is slow, computes in float64, and samples greedily only. Tests run programs on it where no real
backend is the subject, and compare real backends with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from steppe.backends import sampling_rules
from steppe.backends.base import StepOutput
from steppe.backends.tape import (
    Add,
    Embed,
    GatedActivation,
    Graph,
    Linear,
    MixtureOfExperts,
    Output,
    PagedAttention,
    RmsNorm,
    RopeWriteKV,
    Softcap,
    TakeRows,
)
from steppe.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from steppe.backends.base import Program, SampleBatch, StepInput
    from steppe.backends.tape import CacheGroup, Op, Tape

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class DoneTicket:
    """A step that was over before it was asked for."""

    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


def _sigmoid(x: Array) -> Array:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), 1 - 1 / (1 + np.exp(-np.abs(x))))


def _activate(kind: str, x: Array) -> Array:
    if kind == "silu":
        return x * _sigmoid(x)
    assert kind == "gelu_tanh"
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class NumpyBackend:
    """A `steppe.backends.base.Backend`."""

    name = "numpy"

    kept_rows = 64

    def __init__(self, page_size: int = 4) -> None:
        self._page_size = page_size

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        return self.tape.groups

    def trace(self, program: Program, *, kv_dtype: str = "auto") -> None:
        graph = Graph(program.layers)
        program.build(graph)
        self.tape: Tape = graph.tape()
        self._program = program
        self._parameters: dict[str, Array] = {}
        self._group_of = {
            layer: g for g, group in enumerate(self.tape.groups) for layer in group.layers
        }

    def page_bytes(self, group: int) -> int:
        spec = self.groups[group].spec
        layers = len(self.groups[group].layers)
        return 2 * 8 * layers * self._page_size * spec.num_kv_heads * spec.head_dim

    def allocate_cache(self, num_pages: Sequence[int]) -> None:
        def empty(layer: int) -> Array:
            spec = self.tape.layers[layer]
            slots = num_pages[self._group_of[layer]] * self._page_size
            return np.zeros((slots, spec.num_kv_heads, spec.head_dim))

        self._keys = [empty(layer) for layer in range(len(self.tape.layers))]
        self._values = [empty(layer) for layer in range(len(self.tape.layers))]

    @property
    def cache_format(self) -> str:
        return "numpy"

    def read_pages(self, group: int, pages: Sequence[int]) -> NDArray[np.uint8]:
        parts = [
            memory.reshape(-1, self.page_bytes(group) // self._parts(group))[list(pages)]
            for memory in self._memories(group)
        ]
        return np.concatenate(parts, axis=1)

    def write_pages(self, group: int, pages: Sequence[int], data: NDArray[np.uint8]) -> None:
        parts = np.split(data, self._parts(group), axis=1)
        for memory, part in zip(self._memories(group), parts, strict=True):
            memory.reshape(-1, part.shape[1])[list(pages)] = part

    def _parts(self, group: int) -> int:
        return 2 * len(self.groups[group].layers)

    def _memories(self, group: int) -> list[NDArray[np.uint8]]:
        """The bytes of every layer's keys, then of their values."""
        layers = self.groups[group].layers
        return [
            memory[layer].view(np.uint8).reshape(-1)
            for memory in (self._keys, self._values)
            for layer in layers
        ]

    def capture(self) -> bool:
        return False

    def embedding_table(self) -> NDArray[np.float32]:
        name = next(op.weight for op in self.tape.ops if isinstance(op, Embed))
        return self._program.weights[name].dequantize()

    def launch(self, step: StepInput, sample: SampleBatch) -> DoneTicket:
        if np.any(sample.rows["temperature"] >= 1e-5):
            raise BackendError("the numpy backend samples greedily only")
        values: dict[int, Array] = {}
        hidden: dict[str, NDArray[np.float32]] = {}
        for op in self.tape.ops:
            if isinstance(op, Output):
                if op.name in step.outputs:
                    rows = slice(None) if step.hidden_rows is None else step.hidden_rows
                    hidden[op.name] = values[op.x][rows].astype(np.float32)
            else:
                values[op.out] = self._run(op, values, step)
        logits = values[self.tape.outputs["logits"]]
        self._kept = logits.astype(np.float32)
        target = sample.rows["target"]
        sampled = np.where(target >= 0, target, logits.argmax(axis=-1) if len(logits) else target)
        return DoneTicket(
            StepOutput(
                sampled.astype(np.int32),
                hidden=hidden,
                logits=logits.astype(np.float32) if step.return_logits else None,
            )
        )

    def resample(self, rows: NDArray[np.int32], sample: SampleBatch) -> StepOutput:
        assert len(self._kept) <= self.kept_rows
        return sampling_rules.sample_rows(self._kept[rows], sample)

    def _run(self, op: Op, values: dict[int, Array], step: StepInput) -> Array:
        match op:
            case Embed():
                return self._parameter(op.weight)[step.token_ids] * op.scale
            case RmsNorm():
                x = values[op.x]
                parts = x.reshape(len(x), op.heads, -1)
                size = np.sqrt((parts**2).mean(axis=-1, keepdims=True) + op.eps)
                return (parts / size * self._parameter(op.weight)).reshape(x.shape)
            case Linear():
                y = values[op.x] @ self._parameter(f"{op.site}.weight").T
                return y + self._parameter(f"{op.site}.bias") if op.bias else y
            case RopeWriteKV():
                return self._rope_write_kv(op, values, step)
            case PagedAttention():
                return self._attention(op, values[op.q], step)
            case GatedActivation():
                return _activate(op.activation, values[op.gate]) * values[op.up]
            case Add():
                return values[op.a] + values[op.b]
            case TakeRows():
                return values[op.x][step.logit_rows]
            case Softcap():
                return op.cap * np.tanh(values[op.x] / op.cap)
            case MixtureOfExperts():
                return self._experts(op, values[op.x])
        raise AssertionError(op)

    def _parameter(self, name: str) -> Array:
        if name not in self._parameters:
            self._parameters[name] = self._program.weights[name].dequantize().astype(np.float64)
        return self._parameters[name]

    def _rope_write_kv(self, op: RopeWriteKV, values: dict[int, Array], step: StepInput) -> Array:
        spec = self.tape.layers[op.layer]
        angles = step.positions.reshape(-1, 1).astype(np.float64) * op.rope.inv_freq.astype(
            np.float64
        )
        cos = np.cos(angles)[:, None] * op.rope.scale
        sin = np.sin(angles)[:, None] * op.rope.scale
        half = op.rope.inv_freq.size

        def rotate(x: Array) -> Array:
            heads = x.reshape(len(x), -1, spec.head_dim)
            first, second, rest = np.split(heads, (half, 2 * half), axis=-1)
            turned = (first * cos - second * sin, second * cos + first * sin, rest)
            return np.concatenate(turned, axis=-1)

        slots = step.slot_mappings[self._group_of[op.layer]]
        self._keys[op.layer][slots] = rotate(values[op.k])
        self._values[op.layer][slots] = values[op.v].reshape(
            len(slots), spec.num_kv_heads, spec.head_dim
        )
        return rotate(values[op.q]).reshape(values[op.q].shape)

    def _attention(self, op: PagedAttention, q: Array, step: StepInput) -> Array:
        spec = self.tape.layers[op.layer]
        table = step.block_tables[self._group_of[op.layer]]
        share = op.num_heads // spec.num_kv_heads
        out = np.empty_like(q)
        for sequence, length in enumerate(step.context_len):
            first, last = step.query_start[sequence], step.query_start[sequence + 1]
            place = np.arange(length)
            # Pages that fell out of a window may be gone; their keys are masked below.
            pages = np.maximum(table[sequence, place // self._page_size], 0)
            slots = pages * self._page_size + place % self._page_size
            keys = np.repeat(self._keys[op.layer][slots], share, axis=1)
            vals = np.repeat(self._values[op.layer][slots], share, axis=1)
            query = q[first:last].reshape(last - first, op.num_heads, spec.head_dim)
            scores = np.einsum("qhd,khd->hqk", query, keys) * op.scale
            if op.softcap is not None:
                scores = op.softcap * np.tanh(scores / op.softcap)
            behind = np.arange(length - (last - first), length)[:, None] - place[None]
            seen = behind >= 0
            if spec.window is not None:
                seen &= behind < spec.window
            weights = _softmax(np.where(seen, scores, -np.inf))
            out[first:last] = np.einsum("hqk,khd->qhd", weights, vals).reshape(last - first, -1)
        return out

    def _experts(self, op: MixtureOfExperts, x: Array) -> Array:
        chances = _softmax(x @ self._parameter(f"{op.site}.gate.weight").T)
        chosen = np.argsort(-chances, axis=-1, kind="stable")[:, : op.top_k]
        out = np.zeros_like(x)
        for row, experts in enumerate(chosen):
            share = chances[row, experts]
            if op.normalize:
                share = share / share.sum()
            for expert, weight in sorted(zip(experts, share, strict=True)):
                site = f"{op.site}.experts.{expert}"
                gate = x[row] @ self._parameter(f"{site}.gate_proj.weight").T
                up = x[row] @ self._parameter(f"{site}.up_proj.weight").T
                inner = _activate(op.activation, gate) * up
                out[row] += weight * (inner @ self._parameter(f"{site}.down_proj.weight").T)
        return out
