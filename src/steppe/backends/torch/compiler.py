"""From the operations of a tape to closures over loaded weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from steppe.backends import tape as ops
from steppe.backends.torch import ops as kernels
from steppe.backends.torch.attention import attend

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.backends.torch.cache import PagedCache
    from steppe.backends.torch.walk import Computation, Frame
    from steppe.backends.torch.weights import WeightStore

__all__ = ["Compiler"]


class Compiler:
    """Makes one closure for each operation, loading what it needs from ``weights``.

    Raises ModelError for a parameter that is missing or has another shape than the tape says.
    """

    def __init__(self, tape: ops.Tape, vocab: int, weights: WeightStore, cache: PagedCache) -> None:
        self._tape = tape
        self._vocab = vocab
        self._weights = weights
        self._cache = cache
        self._ropes: dict[tuple[bytes, float], tuple[int, kernels.RopeTable]] = {}

    def compile(self) -> dict[int, Callable[[Frame], torch.Tensor]]:
        """Closures by the id of the value they compute."""
        return {op.out: self._kernel(op) for op in self._tape.ops if not isinstance(op, ops.Output)}

    def _kernel(self, op: Computation) -> Callable[[Frame], torch.Tensor]:
        match op:
            case ops.Embed():
                return self._embed(op)
            case ops.RmsNorm():
                return self._rms_norm(op)
            case ops.Linear():
                return self._linear(op)
            case ops.RopeWriteKV():
                return self._rope_write_kv(op)
            case ops.PagedAttention():
                return self._paged_attention(op)
            case ops.MixtureOfExperts():
                return self._mixture_of_experts(op)
            case ops.GatedActivation(gate=gate, up=up, activation=activation):
                return lambda frame: kernels.gated_activation(
                    frame.value(gate), frame.value(up), activation
                )
            case ops.Add(a=a, b=b):
                return lambda frame: frame.value(a) + frame.value(b)
            case ops.Softcap(x=x, cap=cap):
                return lambda frame: kernels.softcap(frame.value(x), cap)
            case ops.TakeRows(x=x):
                return lambda frame: frame.value(x).index_select(0, frame.logit_rows)

    def _embed(self, op: ops.Embed) -> Callable[[Frame], torch.Tensor]:
        table = self._weights.get(op.weight, (self._vocab, self._tape.widths[op.out]))
        scale = op.scale

        def embed(frame: Frame) -> torch.Tensor:
            rows = table.index_select(0, frame.tokens)
            return rows if scale == 1.0 else rows.mul_(scale)

        return embed

    def _rms_norm(self, op: ops.RmsNorm) -> Callable[[Frame], torch.Tensor]:
        width = self._tape.widths[op.x] // op.heads
        weight = self._weights.get(op.weight, (width,), torch.float32)
        x, eps, heads = op.x, op.eps, op.heads
        return lambda frame: kernels.rms_norm(frame.value(x), weight, eps, heads)

    def _linear(self, op: ops.Linear) -> Callable[[Frame], torch.Tensor]:
        weight = self._matrix(f"{op.site}.weight", op.width, self._tape.widths[op.x])
        bias = self._weights.get(f"{op.site}.bias", (op.width,)) if op.bias else None
        x, width = op.x, op.width
        return lambda frame: kernels.linear(frame.value(x), weight, width, bias)

    def _rope_write_kv(self, op: ops.RopeWriteKV) -> Callable[[Frame], torch.Tensor]:
        key = (op.rope.inv_freq.tobytes(), op.rope.scale)
        if key not in self._ropes:
            table = kernels.RopeTable(op.rope, self._cache.device)
            self._ropes[key] = (len(self._ropes), table)
        number, rope = self._ropes[key]
        head_dim = self._tape.layers[op.layer].head_dim
        group, place = self._cache.place(op.layer)
        cache, q, k, v = self._cache, op.q, op.k, op.v

        def rope_write_kv(frame: Frame) -> torch.Tensor:
            angles = frame.rope.get(number)
            if angles is None:
                angles = frame.rope[number] = rope.rows(frame.positions, frame.highest)
            keys, values = cache.layer(group, place)
            slots = frame.groups[group].slots
            rotated = kernels.rotate(frame.value(k), head_dim, *angles)[: frame.rows]
            keys.write(slots, rotated.view(frame.rows, -1, head_dim))
            fresh = frame.value(v)[: frame.rows]
            values.write(slots, fresh.reshape(frame.rows, -1, head_dim))
            return kernels.rotate(frame.value(q), head_dim, *angles)

        return rope_write_kv

    def _paged_attention(self, op: ops.PagedAttention) -> Callable[[Frame], torch.Tensor]:
        group, place = self._cache.place(op.layer)
        cache, q, num_heads, scale, cap = self._cache, op.q, op.num_heads, op.scale, op.softcap

        def paged_attention(frame: Frame) -> torch.Tensor:
            keys, values = cache.layer(group, place)
            plan = frame.groups[group]
            return attend(
                frame.value(q), keys, values, plan, num_heads=num_heads, scale=scale, cap=cap
            )

        return paged_attention

    def _mixture_of_experts(self, op: ops.MixtureOfExperts) -> Callable[[Frame], torch.Tensor]:
        width = self._tape.widths[op.x]
        router = self._matrix(f"{op.site}.gate.weight", op.num_experts, width)
        experts = [
            (
                self._matrix(f"{expert}.gate_proj.weight", op.expert_width, width),
                self._matrix(f"{expert}.up_proj.weight", op.expert_width, width),
                self._matrix(f"{expert}.down_proj.weight", width, op.expert_width),
            )
            for expert in (f"{op.site}.experts.{number}" for number in range(op.num_experts))
        ]
        return lambda frame: kernels.mixture_of_experts(
            frame.value(op.x),
            frame.rows,
            router,
            experts,
            top_k=op.top_k,
            expert_width=op.expert_width,
            normalize=op.normalize,
            activation=op.activation,
        )

    def _matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return kernels.pad_columns(self._weights.get(name, (rows, columns)))
