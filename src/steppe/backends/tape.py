"""The traced form of a model: a short list of typed operations over numbered values (DESIGN section
5).

A model calls the methods of ``Graph`` once, at load. What it gets back are handles without data, so
a program cannot read values or sizes; the result is a ``Tape`` that any backend can walk. Row-wise
shapes are given as [T, width] with T the tokens of a step, or [R, width] after ``take_rows``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from steppe.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Activation",
    "Add",
    "CacheGroup",
    "CacheSpec",
    "Embed",
    "GatedActivation",
    "Graph",
    "Linear",
    "MixtureOfExperts",
    "Op",
    "Output",
    "PagedAttention",
    "RmsNorm",
    "RopeSpec",
    "RopeWriteKV",
    "Softcap",
    "TakeRows",
    "Tape",
    "Value",
]

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one layer keeps per token. ``window`` w: a query sees itself and the w - 1 keys before
    it.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with equal cache specs: they share one block table."""

    spec: CacheSpec
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RopeSpec:
    """Rotary embedding over the first ``2 * len(inv_freq)`` dimensions of a head, halves rotated
    (not pairs).

    ``inv_freq`` float32 radians per position; cos and sin are multiplied by ``scale`` (yarn).
    """

    inv_freq: npt.NDArray[np.float32]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Value:
    """Handle of a traced value: [rows, width] float, no data."""

    id: int
    width: int


@dataclass(frozen=True, slots=True)
class Embed:
    """out[t] = scale * table[token_ids[t]], or the row of the input buffer that replaces it."""

    out: int
    weight: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """out = x / sqrt(mean(x^2) + eps) * weight over each of ``heads`` equal parts of a row."""

    out: int
    x: int
    weight: str
    eps: float
    heads: int = 1


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x W^T (+ bias). ``site`` names it: weight ``site.weight`` [out, in], bias ``site.bias``
    if ``bias``.
    """

    out: int
    x: int
    site: str
    width: int
    bias: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RopeWriteKV:
    """Rotate q and k, write k and v to this layer's cache at the step's slots; out is the rotated
    q.
    """

    out: int
    q: int
    k: int
    v: int
    layer: int
    rope: RopeSpec


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Causal attention of q [T, num_heads * head_dim] over the layer's cache, grouped query heads.

    score = softcap(q k * scale), softcap(s) = cap * tanh(s / cap) when ``softcap`` is given. The
    window is the cache spec's.
    """

    out: int
    q: int
    layer: int
    num_heads: int
    scale: float
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """out = act(gate) * up."""

    out: int
    gate: int
    up: int
    activation: Activation


@dataclass(frozen=True, slots=True)
class Add:
    """out = a + b."""

    out: int
    a: int
    b: int


@dataclass(frozen=True, slots=True)
class TakeRows:
    """out[r] = x[logit_rows[r]]: from here on only rows somebody wants logits of."""

    out: int
    x: int


@dataclass(frozen=True, slots=True)
class Softcap:
    """out = cap * tanh(x / cap)."""

    out: int
    x: int
    cap: float


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Router ``site.gate`` [E, in]; softmax over all experts, the best ``top_k``, weights
    renormalised if asked.

    Expert e is down(act(gate(x)) * up(x)) with ``site.experts.{e}.{gate,up,down}_proj.weight``; out
    is the weighted sum in rising expert order.
    """

    out: int
    x: int
    site: str
    num_experts: int
    top_k: int
    expert_width: int
    normalize: bool
    activation: Activation


@dataclass(frozen=True, slots=True)
class Output:
    """Names a value: ``logits``, ``hidden[i]`` (input of layer i; [num_layers] is after the last),
    ``final_hidden``.
    """

    name: str
    x: int


Op = (
    Embed
    | RmsNorm
    | Linear
    | RopeWriteKV
    | PagedAttention
    | GatedActivation
    | Add
    | TakeRows
    | Softcap
    | MixtureOfExperts
    | Output
)


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """A traced program. ``layers[i]`` is layer i's cache spec; ``outputs`` maps a name to a value
    id.
    """

    ops: tuple[Op, ...]
    layers: tuple[CacheSpec, ...]
    groups: tuple[CacheGroup, ...]
    outputs: dict[str, int]
    widths: dict[int, int]


class Graph:
    """Records the operations a model program asks for. Used once, by ``trace``."""

    def __init__(self, layers: Sequence[CacheSpec]) -> None:
        self._ops: list[Op] = []
        self._layers = tuple(layers)
        self._widths: dict[int, int] = {}
        self._outputs: dict[str, int] = {}

    def embed(self, weight: str, width: int, scale: float = 1.0) -> Value:
        """Token embeddings, times ``scale``."""
        out = self._value(width)
        self._ops.append(Embed(out.id, weight, scale))
        return out

    def rms_norm(self, x: Value, weight: str, eps: float, heads: int = 1) -> Value:
        """RMS norm of each row, or of each head's part of it."""
        if x.width % heads:
            raise BackendError(f"rms_norm {weight}: width {x.width} is not {heads} equal heads")
        out = self._value(x.width)
        self._ops.append(RmsNorm(out.id, x.id, weight, eps, heads))
        return out

    def linear(self, x: Value, site: str, width: int, bias: bool = False) -> Value:
        """A projection to ``width``; ``site`` is where adapters and observers attach."""
        out = self._value(width)
        self._ops.append(Linear(out.id, x.id, site, width, bias))
        return out

    def rope_write_kv(self, q: Value, k: Value, v: Value, layer: int, rope: RopeSpec) -> Value:
        """Rotate q and k, keep k and v; the rotated q."""
        spec = self._layers[layer]
        if k.width != spec.num_kv_heads * spec.head_dim or v.width != k.width:
            raise BackendError(f"layer {layer}: k and v do not fit its cache spec {spec}")
        out = self._value(q.width)
        self._ops.append(RopeWriteKV(out.id, q.id, k.id, v.id, layer, rope))
        return out

    def paged_attention(
        self, q: Value, layer: int, num_heads: int, scale: float, softcap: float | None = None
    ) -> Value:
        """Attention of the rotated q over everything cached so far."""
        out = self._value(q.width)
        self._ops.append(PagedAttention(out.id, q.id, layer, num_heads, scale, softcap))
        return out

    def gated_activation(self, gate: Value, up: Value, activation: Activation) -> Value:
        """act(gate) * up."""
        out = self._value(gate.width)
        self._ops.append(GatedActivation(out.id, gate.id, up.id, activation))
        return out

    def add(self, a: Value, b: Value) -> Value:
        """a + b."""
        out = self._value(a.width)
        self._ops.append(Add(out.id, a.id, b.id))
        return out

    def take_rows(self, x: Value) -> Value:
        """Only the rows that logits are wanted of."""
        out = self._value(x.width)
        self._ops.append(TakeRows(out.id, x.id))
        return out

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap)."""
        out = self._value(x.width)
        self._ops.append(Softcap(out.id, x.id, cap))
        return out

    def mixture_of_experts(
        self,
        x: Value,
        site: str,
        *,
        num_experts: int,
        top_k: int,
        expert_width: int,
        normalize: bool,
        activation: Activation,
    ) -> Value:
        """A routed feed-forward block."""
        out = self._value(x.width)
        self._ops.append(
            MixtureOfExperts(
                out.id, x.id, site, num_experts, top_k, expert_width, normalize, activation
            )
        )
        return out

    def output(self, name: str, x: Value) -> None:
        """Name a value so that a step can ask for it."""
        if name in self._outputs:
            raise BackendError(f"output {name} is named twice")
        self._outputs[name] = x.id
        self._ops.append(Output(name, x.id))

    def tape(self) -> Tape:
        """Everything recorded."""
        if "logits" not in self._outputs:
            raise BackendError("a program must name its logits")
        members: dict[CacheSpec, list[int]] = {}
        for layer, spec in enumerate(self._layers):
            members.setdefault(spec, []).append(layer)
        return Tape(
            ops=tuple(self._ops),
            layers=self._layers,
            groups=tuple(CacheGroup(spec, tuple(layers)) for spec, layers in members.items()),
            outputs=dict(self._outputs),
            widths=dict(self._widths),
        )

    def _value(self, width: int) -> Value:
        value = Value(len(self._widths), width)
        self._widths[value.id] = width
        return value
