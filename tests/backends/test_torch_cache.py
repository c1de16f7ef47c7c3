"""What the paged cache keeps of keys and values, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steppe.backends.tape import CacheGroup, CacheSpec
from steppe.backends.torch.cache import PagedCache, quantize
from steppe.errors import BackendError

CPU = torch.device("cpu")
GROUPS = (CacheGroup(CacheSpec(2, 12), (0, 2)), CacheGroup(CacheSpec(1, 8, 5), (1,)))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_written_is_read_in_the_cache_s_own_rounding(
    rng: np.random.Generator, dtype: torch.dtype
) -> None:
    cache = PagedCache(GROUPS, 4, CPU, dtype)
    cache.allocate([3, 2])
    rows = torch.from_numpy((rng.standard_normal((5, 2, 12)) * 9).astype(np.float32))
    slots = torch.from_numpy(rng.permutation(12)[:5])
    keys, values = cache.layer(0, 1)
    keys.write(slots, rows)
    kept = keys.read(slots)
    if dtype == torch.int8:
        step = rows.abs().amax(dim=-1, keepdim=True) / 127
        assert ((kept - rows).abs() <= 0.501 * step).all()
    else:
        assert torch.equal(kept, rows.to(dtype).float())
    assert not values.read(slots).any()
    assert not cache.layer(0, 0)[0].read(slots).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_costs_what_its_tensors_take(dtype: torch.dtype) -> None:
    cache = PagedCache(GROUPS, 4, CPU, dtype)
    counts = (3, 2)
    cache.allocate(counts)
    for number, (group, pages) in enumerate(zip(GROUPS, counts, strict=True)):
        taken = 0
        for place in range(len(group.layers)):
            for cached in cache.layer(number, place):
                taken += cached.data.nbytes
                taken += 0 if cached.scales is None else cached.scales.nbytes
        assert cache.page_bytes(number) * pages == taken


def test_int8_rows_are_quantised_as_numpy_says(rng: np.random.Generator) -> None:
    sizes = 10.0 ** rng.integers(-20, 20, (7, 3, 1))
    rows = (rng.standard_normal((7, 3, 10)) * sizes).astype(np.float32)
    rows[2, 1] = 0.0
    rows[3, 0] = 1e-35
    quants, scales = quantize(torch.from_numpy(rows))
    largest = np.abs(rows).max(axis=2)
    small = largest < 1e-30
    expected = np.where(small, np.float32(0), largest * np.float32(1 / 127))
    np.testing.assert_array_equal(scales.numpy(), expected)
    inverse = np.where(small, np.float32(0), np.float32(127) / np.where(small, 1, largest))
    scaled = rows * inverse[:, :, None].astype(np.float32)
    np.testing.assert_array_equal(quants.numpy(), np.rint(scaled))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_in_int8(rng: np.random.Generator, bad: float) -> None:
    rows = torch.from_numpy(rng.standard_normal((2, 1, 9)).astype(np.float32))
    rows[1, 0, 4] = bad
    _, scales = quantize(rows)
    assert scales[0].isfinite().all()
    assert not scales[1].isfinite().any()


def test_wrong_counts_are_refused() -> None:
    cache = PagedCache(GROUPS, 4, CPU, torch.int8)
    with pytest.raises(BackendError, match="groups"):
        cache.allocate([3])
    with pytest.raises(BackendError, match="groups"):
        cache.allocate([3, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_copied_whole_with_their_scales(
    rng: np.random.Generator, dtype: torch.dtype
) -> None:
    cache = PagedCache(GROUPS, 4, CPU, dtype)
    cache.allocate([4, 1])
    slots = torch.arange(8)
    for place in range(2):
        for cached in cache.layer(0, place):
            cached.write(slots, torch.from_numpy(rng.standard_normal((8, 2, 12))).float())
    copied = cache.read(0, [1, 0])
    assert copied.shape == (2, cache.page_bytes(0))
    cache.write(0, [2, 3], copied)
    for place in range(2):
        for cached in cache.layer(0, place):
            assert torch.equal(cached.read(slots + 8), cached.read(slots).roll(4, 0))
