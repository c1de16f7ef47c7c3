"""The row-wise operations, each written so that a row's bits depend on that row alone.

What was found by experiment and is kept true by ``tests/backends/test_invariance.py``, for float32
on the CPU (torch 2.11 to 2.13 with MKL):

* A matrix product gives a row the same bits at every row count that is a multiple of ``ROW_TILE``,
  at every place in it and at one or two threads, provided there are at least ``MIN_COLUMNS``
  columns and at most ``MAX_DEPTH`` values in a row. Below 16 rows the library changes algorithms;
  with fewer columns and an odd depth the bits follow a row's alignment; deeper sums are split among
  threads on some processors. Hence steps are padded to whole tiles, narrow weights are padded with
  zero rows, no product has more than ``MAX_ROWS`` rows, and deep ones are added up slice by slice.
* ``exp``, ``tanh``, ``softmax``, ``log_softmax`` and a sum over the last axis treat every row
  alike. ``silu``, ``gelu`` and ``sigmoid`` do not: the tail of a vectorised loop is computed by
  another formula than its body. They are built from ``exp`` and exact operations instead.
* Products that are added afterwards are separate operations: a fused one may round once or twice,
  depending on the place in a vector.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from steppe.backends.tape import Activation, RopeSpec

__all__ = [
    "MAX_DEPTH",
    "MAX_ROWS",
    "MIN_COLUMNS",
    "ROW_TILE",
    "RopeTable",
    "gated_activation",
    "linear",
    "mixture_of_experts",
    "pad_columns",
    "padded_rows",
    "rms_norm",
    "rotate",
    "softcap",
]

ROW_TILE = 16
MIN_COLUMNS = 16
MAX_ROWS = 256
MAX_DEPTH = 512

_GELU_SLOPE = math.sqrt(2.0 / math.pi)
_ROPE_CHUNK = 1024


def padded_rows(rows: int) -> int:
    """``rows`` rounded up to whole tiles, at least one."""
    return max(ROW_TILE, -(-rows // ROW_TILE) * ROW_TILE)


def pad_columns(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] with zero rows up to ``MIN_COLUMNS``; itself if it is wide enough."""
    missing = MIN_COLUMNS - weight.shape[0]
    if missing <= 0:
        return weight
    return torch.cat((weight, weight.new_zeros(missing, weight.shape[1])))


def linear(
    x: torch.Tensor, weight: torch.Tensor, width: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [rows, in] times a padded weight [>= width, in] transposed: [rows, width].

    ``rows`` is a multiple of ``ROW_TILE``.
    """
    rows = x.shape[0]
    if rows <= MAX_ROWS:
        out = _product(x, weight)
    else:
        out = x.new_empty(rows, weight.shape[0])
        for start in range(0, rows, MAX_ROWS):
            stop = min(start + MAX_ROWS, rows)
            out[start:stop] = _product(x[start:stop], weight)
    if width != weight.shape[0]:
        out = out[:, :width].contiguous()
    if bias is not None:
        out += bias
    return out


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One slice of the depth after another, each within what keeps its bits."""
    depth = x.shape[1]
    if depth <= MAX_DEPTH:
        return torch.mm(x, weight.t())
    out = torch.mm(x[:, :MAX_DEPTH], weight[:, :MAX_DEPTH].t())
    for start in range(MAX_DEPTH, depth, MAX_DEPTH):
        stop = start + MAX_DEPTH
        out += torch.mm(x[:, start:stop], weight[:, start:stop].t())
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, heads: int) -> torch.Tensor:
    """Over each of ``heads`` equal parts of a row; in float32 whatever x is."""
    parts = x.view(x.shape[0] * heads, -1).float()
    scale = torch.rsqrt(parts.square().mean(dim=-1, keepdim=True) + eps)
    return ((parts * scale) * weight).to(x.dtype).view(x.shape)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """act(gate) * up, in float32 whatever they are.

    Both activations are x / (1 + exp(-y)): y is x for silu; for gelu with tanh it is twice the
    tanh's argument, since (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)).
    """
    x = gate.float()
    y = x if activation == "silu" else (x + x * x * x * 0.044715) * (2.0 * _GELU_SLOPE)
    out = torch.neg(y).exp_().add_(1.0)
    torch.div(x, out, out=out)
    return out.mul_(up).to(gate.dtype)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap)."""
    return (x.float() / cap).tanh_().mul_(cap).to(x.dtype)


def mixture_of_experts(
    x: torch.Tensor,
    rows: int,
    router: torch.Tensor,
    experts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    *,
    top_k: int,
    expert_width: int,
    normalize: bool,
    activation: Activation,
) -> torch.Tensor:
    """A routed feed-forward of x [padded rows, width]; rows past ``rows`` are padding, and zero.

    ``experts`` are (gate, up, down) weights. Equal router scores go to the lowest expert. Each
    expert sees its own rows, padded to whole tiles, and adds its share in rising expert order.
    """
    width = x.shape[1]
    chances = torch.softmax(linear(x, router, len(experts)).float(), dim=-1)[:rows]
    chosen = torch.argsort(chances, dim=-1, descending=True, stable=True)[:, :top_k]
    share = chances.gather(1, chosen)
    if normalize:
        total = share[:, :1].clone()
        for place in range(1, top_k):
            total += share[:, place : place + 1]
        share = share / total
    out = torch.zeros_like(x, dtype=torch.float32)
    for number, (gate, up, down) in enumerate(experts):
        mine, column = torch.nonzero(chosen == number, as_tuple=True)
        if mine.numel() == 0:
            continue
        inputs = x.new_zeros(padded_rows(mine.numel()), width)
        inputs[: mine.numel()] = x[mine]
        inner = gated_activation(
            linear(inputs, gate, expert_width), linear(inputs, up, expert_width), activation
        )
        result = linear(inner, down, width)[: mine.numel()].float()
        out[mine] += result * share[mine, column].unsqueeze(1)
    return out.to(x.dtype)


class RopeTable:
    """cos and sin of every position used so far, float32.

    It grows by chunks of fixed size and place, so that an entry is always computed alike.
    """

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        # Frequencies times positions on the CPU, as transformers does, whatever the device is:
        # at large angles other roundings would be other positions.
        self._frequencies = torch.tensor(spec.inv_freq.tolist(), dtype=torch.float32)
        self._scale = spec.scale
        self._device = device
        self._cos = torch.empty(0, self._frequencies.numel(), device=device)
        self._sin = torch.empty(0, self._frequencies.numel(), device=device)

    def rows(self, positions: torch.Tensor, highest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, frequencies] of positions int64[T], none above ``highest``."""
        while self._cos.shape[0] <= highest:
            start = self._cos.shape[0]
            times = torch.arange(start, start + _ROPE_CHUNK, dtype=torch.float32)
            angles = times[:, None] * self._frequencies[None, :]
            cos = (angles.cos() * self._scale).to(self._device)
            sin = (angles.sin() * self._scale).to(self._device)
            self._cos = torch.cat((self._cos, cos))
            self._sin = torch.cat((self._sin, sin))
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, head_dim: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads * head_dim] with the halves of each head's first dimensions rotated."""
    half = cos.shape[-1]
    heads = x.view(x.shape[0], -1, head_dim)
    low, high = heads[..., :half], heads[..., half : 2 * half]
    out = torch.empty_like(heads)
    out[..., :half] = low * cos - high * sin
    out[..., half : 2 * half] = high * cos + low * sin
    out[..., 2 * half :] = heads[..., 2 * half :]
    return out.view(x.shape)
