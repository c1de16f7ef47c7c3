"""Coordinates of a rank."""

from __future__ import annotations

from typing import Any

import pytest

from steppe.errors import BackendError
from steppe.runtime.parallel.mapping import ParallelMapping


def test_the_default_is_one_rank_alone() -> None:
    mapping = ParallelMapping()
    assert (mapping.world_size, mapping.rank, mapping.parallel) == (1, 0, False)


@pytest.mark.parametrize("size", [0, -3])
def test_sizes_below_one_count_as_one(size: int) -> None:
    mapping = ParallelMapping(world_size=size, tensor_parallel_size=size)
    assert (mapping.world_size, mapping.tensor_parallel_size) == (1, 1)


def test_a_world_of_several_is_parallel() -> None:
    mapping = ParallelMapping(4, 3, tensor_parallel_size=2, tensor_parallel_rank=1, local_device=3)
    assert mapping.parallel


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"world_size": 2, "rank": 2}, "rank 2 is outside a world of 2"),
        ({"rank": -1}, "rank -1 is outside"),
        (
            {"world_size": 2, "tensor_parallel_size": 2, "tensor_parallel_rank": 2},
            "tensor parallel rank 2 is outside a group of 2",
        ),
        ({"world_size": 4, "tensor_parallel_size": 3}, "a world of 4 does not divide"),
    ],
)
def test_impossible_coordinates_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        ParallelMapping(**fields)
