"""Dequantisation against the ``gguf`` package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from steppe.errors import CheckpointError, UnsupportedModelError
from steppe.formats import dequant
from steppe.formats.dequant import dequantize, packed_size
from steppe.formats.ggml_types import GGML_TYPES, TYPE_NAMES
from tests.formats.build import SUPPORTED, random_blocks


def reference(raw: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[dtype])
    return np.asarray(values, dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("dtype", SUPPORTED)
@pytest.mark.parametrize("shape", [(1, 256), (7, 512), (3, 5, 256), (256,)])
def test_bits_equal_the_reference(
    dtype: str, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    raw = random_blocks(rng, dtype, shape)
    values = dequantize(dtype, raw.reshape(-1), shape)
    assert values.dtype == np.float32
    assert values.shape == shape
    assert values.flags.c_contiguous
    assert values.flags.writeable
    expected = reference(raw, dtype, shape)
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_chunks_do_not_show(
    dtype: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several whole chunks and a remainder give what one chunk gives."""
    shape = (11, 768)
    raw = random_blocks(rng, dtype, shape).reshape(-1)
    whole = dequantize(dtype, raw, shape)
    monkeypatch.setattr(dequant, "_CHUNK_VALUES", 1024)
    np.testing.assert_array_equal(
        dequantize(dtype, raw, shape).view(np.uint32), whole.view(np.uint32)
    )


@pytest.mark.parametrize("dtype", ["Q4_1", "Q5_1", "Q8_0", "Q4_0", "Q5_0"])
def test_a_quantised_row_comes_back_within_half_a_step(
    dtype: str, rng: np.random.Generator
) -> None:
    """The oracle's quantiser as a second witness: decoding is near what was encoded."""
    values = rng.standard_normal((4, 256)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[dtype])
    levels = {"Q4_0": 15, "Q4_1": 15, "Q5_0": 31, "Q5_1": 31, "Q8_0": 255}[dtype]
    blocks = values.reshape(-1, 32)
    step = 2 * np.abs(blocks).max(axis=1, keepdims=True) / levels
    decoded = dequantize(dtype, raw.reshape(-1), (4, 256)).reshape(-1, 32)
    assert np.all(np.abs(decoded - blocks) <= 1.1 * step)


def test_unaligned_bytes_are_read(rng: np.random.Generator) -> None:
    raw = random_blocks(rng, "F32", (2, 16)).reshape(-1)
    shifted = np.empty(raw.size + 1, dtype=np.uint8)
    shifted[1:] = raw
    np.testing.assert_array_equal(
        dequantize("F32", shifted[1:], (2, 16)).view(np.uint8).ravel(), raw
    )


def test_an_f32_tensor_is_copied(rng: np.random.Generator) -> None:
    raw = random_blocks(rng, "F32", (2, 16)).reshape(-1)
    before = raw.copy()
    dequantize("F32", raw, (2, 16))[...] = 7
    np.testing.assert_array_equal(raw, before)


@pytest.mark.parametrize("dtype", SUPPORTED)
@pytest.mark.parametrize("extra", [-1, 1])
def test_a_wrong_size_is_refused(dtype: str, extra: int) -> None:
    size = packed_size(dtype, (2, 256)) + extra
    with pytest.raises(CheckpointError, match=str(size)):
        dequantize(dtype, np.zeros(size, dtype=np.uint8), (2, 256))


def test_a_row_of_half_a_block_is_refused() -> None:
    with pytest.raises(CheckpointError, match="48 values"):
        packed_size("Q4_0", (2, 48))
    with pytest.raises(CheckpointError, match="no whole number"):
        packed_size("Q4_K", ())


def test_an_empty_tensor_has_no_values() -> None:
    assert dequantize("Q4_0", np.empty(0, dtype=np.uint8), (0, 32)).shape == (0, 32)


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="IQ1_S"):
        packed_size("IQ1_S", (1, 256))


def test_the_table_agrees_with_the_package() -> None:
    assert set(GGML_TYPES) == set(SUPPORTED)
    for kind in GGML_TYPES.values():
        theirs = gguf.GGMLQuantizationType[kind.name]
        assert kind.code == theirs.value
        assert (kind.elements, kind.nbytes) == gguf.GGML_QUANT_SIZES[theirs]
    assert {kind.value: kind.name for kind in gguf.GGMLQuantizationType} == TYPE_NAMES
