"""Packed weights outside of a program: their checksum, their layout, and their way back in."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tests.native.blocks import SCALES, random_blocks
from tests.native.built import _native

PIECE = 256 << 10
PRIME = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def stir(state: int, word: int) -> int:
    x = (state ^ word) * PRIME & MASK
    return (x << 29 | x >> 35) & MASK


def expected_checksum(data: bytes) -> int:
    """The rule in Python: eight lanes of 64-bit words over pieces of 256 KiB."""
    total = len(data)
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        words = np.frombuffer(piece + bytes(64 - len(piece) % 64), "<u8").reshape(-1, 8)
        lanes = [(i + 1) * PRIME & MASK for i in range(8)]
        for block in words.tolist():
            lanes = [stir(lane, word) for lane, word in zip(lanes, block, strict=True)]
        piece_sum = len(piece)
        for lane in lanes:
            piece_sum = stir(piece_sum, lane)
        total = stir(total, piece_sum)
    return total


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000, PIECE - 1, PIECE, PIECE + 77])
def test_the_checksum_is_its_rule(rng: np.random.Generator, size: int) -> None:
    data = rng.integers(0, 256, size, dtype=np.uint8)
    assert _native.checksum(data) == expected_checksum(data.tobytes())


def test_every_single_damage_changes_the_checksum(rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, PIECE + 4099, dtype=np.uint8)
    seen = {_native.checksum(data)}
    places = rng.choice(data.size, 200, replace=False)
    for at in places:
        harmed = data.copy()
        harmed[at] ^= np.uint8(1 << rng.integers(8))
        seen.add(_native.checksum(harmed))
    zeros = {_native.checksum(np.zeros(size, np.uint8)) for size in range(200)}
    swapped = np.concatenate([data[64:128], data[:64], data[128:]])
    assert len(seen) == 201
    assert len(zeros) == 200
    assert _native.checksum(swapped) not in seen


def program(threads: int = 2) -> _native.Program:
    return _native.Program("", threads, 7, 16)


@pytest.mark.parametrize("dtype", [*SCALES, "F32", "F16", "BF16"])
def test_a_packed_matrix_comes_back_as_it_was(rng: np.random.Generator, dtype: str) -> None:
    rows, width = 37, 512
    raw = random_blocks(rng, dtype, rows, width)
    order = rng.permutation(rows)
    packed = _native.packed(dtype, raw, rows, width, order)
    expected = program()
    expected.add_weight(dtype, raw, rows, width, order)
    ours = program()
    checksum = _native.checksum(packed)
    number = ours.add_packed(_native.format_of(dtype), packed, rows, width, checksum)
    assert number == 0
    assert ours.weight_bytes == expected.weight_bytes
    np.testing.assert_array_equal(ours.embedding_table(0), expected.embedding_table(0))


def test_what_does_not_fit_is_refused(rng: np.random.Generator) -> None:
    raw = random_blocks(rng, "Q8_0", 16, 64)
    packed = _native.packed("Q8_0", raw, 16, 64, None)
    checksum = _native.checksum(packed)
    ours = program()
    for wrong in (
        ("Q9_0", packed, 16, 64, checksum),
        ("Q8_0", packed[:-1], 16, 64, checksum),
        ("Q8_0", packed, 17, 64, checksum),
        ("Q8_0", packed, -16, -64, checksum),
        ("Q8_0", packed, 2**31 - 1, 64, checksum),
        ("Q8_0", packed, 16, 64, checksum ^ 1),
    ):
        with pytest.raises(ValueError, match=r"format|shape|checksum"):
            ours.add_packed(*wrong)


@pytest.mark.parametrize("dtype", [*SCALES, "F32", "F16", "BF16"])
def test_packing_adds_little_memory(rng: np.random.Generator, dtype: str) -> None:
    """DESIGN section 8: no format takes more than 15 % more than as stored."""
    raw = random_blocks(rng, dtype, 64, 512)
    assert _native.packed(dtype, raw, 64, 512, None).size <= 1.15 * raw.size


# Bytes of a fixed matrix, packed. Other digests mean another layout: engine directories that exist
# would be misread. Then change kPackedLayout in csrc/core/packed.h with them.
LAYOUT = "columns16-1"
DIGEST = "4ceba24ad45ef390f4477a3dd28f93c8"


def test_the_layout_has_its_name() -> None:
    rng = np.random.default_rng(20261129)
    digest = hashlib.sha256()
    for dtype in [*sorted(SCALES), "BF16", "F16", "F32"]:
        raw = random_blocks(rng, dtype, 33, 256)
        digest.update(_native.packed(dtype, raw, 33, 256, None).tobytes())
    assert (_native.LAYOUT, digest.hexdigest()[:32]) == (LAYOUT, DIGEST)
