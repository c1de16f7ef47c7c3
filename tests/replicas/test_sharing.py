"""One machine, several replicas: nothing is given twice, nothing is given that is not there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.errors import ConfigError
from steppe.replicas.sharing import child_specs, shares

GIB = 2**30


def given_to(replicas: int, **how: Any) -> list[Any]:
    usual = {
        "cores": range(8), "threads": None, "kv_memory": None, "free_memory": 16 * GIB,
        "max_pending": 256,
    }  # fmt: skip
    return shares(replicas, **(usual | how))


@given(replicas=st.integers(1, 12), cores=st.integers(1, 16), pending=st.integers(12, 300))
def test_shares_are_equal_and_no_core_has_two_owners(
    replicas: int, cores: int, pending: int
) -> None:
    found = given_to(replicas, cores=range(cores), max_pending=pending, kv_memory=replicas * 100)
    owned = [core for one in found for core in one.cores or ()]
    assert len(owned) == len(set(owned))
    if cores >= replicas:
        assert all(one.threads == len(one.cores) == cores // replicas for one in found)
    else:
        assert all(one.cores is None and one.threads == 1 for one in found)
    assert {one.kv_memory for one in found} == {100}
    assert pending <= sum(one.max_concurrent for one in found) < pending + replicas


def test_what_is_given_is_given_for_all_together() -> None:
    assert [one.threads for one in given_to(2, threads=4)] == [2, 2]
    assert [one.threads for one in given_to(2, threads=100)] == [4, 4], "not more than its cores"
    assert [one.kv_memory for one in given_to(4)] == [GIB] * 4
    assert [one.kv_memory for one in given_to(2, free_memory=64 * GIB)] == [2 * GIB] * 2
    for wrong, field in (
        ({"threads": 1}, "threads"),
        ({"max_pending": 1}, "max_pending"),
        ({"gpus": ["0", "1", "2"]}, "gpus"),
        ({"gpus": ["0", "0"]}, "gpus"),
    ):
        with pytest.raises(ConfigError) as refused:
            given_to(2, **wrong)
        assert refused.value.field == field
    with pytest.raises(ConfigError, match="replicas"):
        given_to(0)


def test_gpus_are_dealt_out_and_each_process_sees_its_own() -> None:
    found = given_to(2, gpus=["3", "GPU-17", "1", "0"])
    assert [one.gpus for one in found] == [("3", "GPU-17"), ("1", "0")]
    seen = [dict(spec.environment) for spec in child_specs(found, {})]
    assert seen == [
        {"CUDA_VISIBLE_DEVICES": "3,GPU-17"}, {"CUDA_VISIBLE_DEVICES": "1,0"},
    ]  # fmt: skip
    assert all(not spec.environment for spec in child_specs(given_to(2), {})), "what we see"


def test_each_process_is_told_its_share() -> None:
    one, other = child_specs(given_to(2, max_pending=10), {"model": "m", "threads": None})
    assert one.options == {
        "model": "m", "threads": 4, "kv_memory": 2 * GIB, "max_pending": 10,
    }  # fmt: skip
    assert (one.cores, other.cores) == ((0, 1, 2, 3), (4, 5, 6, 7))
