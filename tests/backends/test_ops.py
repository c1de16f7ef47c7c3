"""The row-wise operations against the plain formula in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from steppe.backends.tape import RopeSpec
from steppe.backends.torch import ops


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def assert_close(ours: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(ours.double(), expected, atol=atol, rtol=1e-5)


@pytest.mark.parametrize(("width", "depth"), [(1, 5), (7, 33), (16, 8), (61, 24)])
@pytest.mark.parametrize("rows", [16, 272, 528])
def test_linear(generator: torch.Generator, rows: int, depth: int, width: int) -> None:
    x, weight, bias = (normal(generator, *s) for s in ((rows, depth), (width, depth), (width,)))
    padded = ops.pad_columns(weight)
    assert padded.shape[0] >= ops.MIN_COLUMNS
    expected = F.linear(x.double(), weight.double(), bias.double())
    out = ops.linear(x, padded, width, bias)
    assert out.is_contiguous()
    assert_close(out, expected)
    assert_close(ops.linear(x, padded, width), expected - bias.double())


@pytest.mark.parametrize("heads", [1, 3])
def test_rms_norm(generator: torch.Generator, heads: int) -> None:
    x, weight = normal(generator, 16, 33), normal(generator, 33 // heads)
    expected = F.rms_norm(
        x.double().view(16, heads, -1), (33 // heads,), weight.double(), eps=1e-3
    ).view(16, 33)
    assert_close(ops.rms_norm(x, weight, 1e-3, heads), expected)


def test_activations(generator: torch.Generator) -> None:
    gate, up = normal(generator, 16, 37) * 30, normal(generator, 16, 37)
    gate[0, :4] = torch.tensor([0.0, -0.0, 1e4, -1e4])
    wide = gate.double()
    assert_close(ops.gated_activation(gate, up, "silu"), F.silu(wide) * up.double())
    assert_close(
        ops.gated_activation(gate, up, "gelu_tanh"),
        F.gelu(wide, approximate="tanh") * up.double(),
    )


def test_softcap_leaves_its_argument_alone(generator: torch.Generator) -> None:
    x = normal(generator, 16, 5) * 40
    before = x.clone()
    assert_close(ops.softcap(x, 30.0), 30.0 * torch.tanh(x.double() / 30.0))
    assert torch.equal(x, before)


@pytest.mark.parametrize("half", [2, 5])
def test_rope_rotates_the_first_halves(generator: torch.Generator, half: int) -> None:
    head_dim, scale = 10, 1.25
    frequencies = (1e4 ** -np.linspace(0, 1, half)).astype(np.float32)
    positions = torch.tensor([0, 1, 5, 1023, 1024, 3000])
    x = normal(generator, 6, 2 * head_dim)
    table = ops.RopeTable(RopeSpec(frequencies, scale), torch.device("cpu"))
    out = ops.rotate(x, head_dim, *table.rows(positions, 3000)).view(6, 2, head_dim)
    # As multiplication of complex numbers.
    angle = (positions[:, None].float() * torch.from_numpy(frequencies)).double()
    heads = x.double().view(6, 2, head_dim)
    turned = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * torch.polar(
        torch.full_like(angle, scale), angle
    ).unsqueeze(1)
    assert_close(out[..., :half], turned.real)
    assert_close(out[..., half : 2 * half], turned.imag)
    assert torch.equal(out[..., 2 * half :], x.view(6, 2, head_dim)[..., 2 * half :])


def test_rope_entries_do_not_depend_on_how_the_table_grew() -> None:
    spec = RopeSpec((1e6 ** -np.linspace(0, 1, 7)).astype(np.float32))
    at_once, bit_by_bit = (ops.RopeTable(spec, torch.device("cpu")) for _ in range(2))
    positions = torch.arange(2500)
    whole = at_once.rows(positions, 2499)
    for end in (1, 900, 1025, 2500):
        last = bit_by_bit.rows(positions[:end], end - 1)
    for a, b in zip(whole, last, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("normalize", [True, False])
def test_mixture_of_experts(generator: torch.Generator, normalize: bool) -> None:
    rows, width, inner, count, top_k = 11, 12, 9, 5, 2
    x = torch.zeros(16, width)
    x[:rows] = normal(generator, rows, width)
    router = normal(generator, count, width)
    experts = [
        (
            normal(generator, inner, width),
            normal(generator, inner, width),
            normal(generator, width, inner),
        )
        for _ in range(count)
    ]
    padded = [tuple(map(ops.pad_columns, expert)) for expert in experts]
    out = ops.mixture_of_experts(
        x,
        rows,
        ops.pad_columns(router),
        padded,  # type: ignore[arg-type]
        top_k=top_k,
        expert_width=inner,
        normalize=normalize,
        activation="silu",
    )
    expected = torch.zeros(rows, width, dtype=torch.float64)
    for row in range(rows):
        token = x[row].double()
        chances = torch.softmax(router.double() @ token, 0)
        best = chances.topk(top_k)
        total = best.values.sum() if normalize else 1.0
        for chance, number in zip(best.values, best.indices.tolist(), strict=True):
            gate, up, down = (w.double() for w in experts[number])
            expected[row] += chance / total * (down @ (F.silu(gate @ token) * (up @ token)))
    assert_close(out[:rows], expected, 1e-4)
    assert not out[rows:].any()


def test_padding_is_to_whole_tiles() -> None:
    assert [ops.padded_rows(n) for n in (0, 1, 16, 17, 64)] == [16, 16, 16, 32, 64]
    assert math.gcd(ops.MAX_ROWS, ops.ROW_TILE) == ops.ROW_TILE
