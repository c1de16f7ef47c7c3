"""The spill tier: bounded, checked, used when it pays, and never seen in the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.errors import ConfigError
from steppe.runtime.kv.context_cache import ContextCacheConfig
from steppe.runtime.kv.spill import RestoreCost, SpillTier
from tests.runtime.asking import ask
from tests.runtime.fakes import fake_runtime, greedy_reference

if TYPE_CHECKING:
    from pathlib import Path

    from steppe.runtime.rank_runtime import LLMRankRuntime

PAGE = 8 * 8
"""Bytes of a page of the fake backend."""


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60), st.integers(1, 5))
def test_the_tier_is_a_bounded_map_that_forgets_the_oldest_use(
    steps: list[tuple[int, bool]], count: int
) -> None:
    tier = SpillTier([3, 5], count * 8 + 7)
    assert tier.pages == count
    model: dict[bytes, int] = {}
    for number, write in steps:
        key = bytes([number])
        expected = key in model
        if write:
            model.pop(key, None)
            model[key] = number
            if len(model) > count:
                del model[next(iter(model))]
            tier.put(1, key, np.full(5, number, np.uint8))
            continue
        page = tier.get(1, key)
        assert (page is not None) == tier.has(1, key) == expected
        if page is not None:
            assert page.tolist() == [number] * 5
            model[key] = model.pop(key)
        assert not tier.has(0, key), "another group's"


def test_a_damaged_copy_is_no_copy() -> None:
    tier = SpillTier([4], 8)
    tier.put(0, b"a", np.arange(4, dtype=np.uint8))
    tier._groups[0].slots[:, 2] ^= 1
    assert tier.get(0, b"a") is None
    assert not tier.has(0, b"a")
    assert (tier.damaged, tier.restored) == (1, 0)
    tier.put(0, b"b", np.zeros(4, np.uint8))
    tier.put(0, b"c", np.zeros(4, np.uint8))
    assert tier.has(0, b"b")


def test_a_file_has_its_room_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    tier = SpillTier([4096], 10 * 4096, tmp_path)
    page = np.arange(4096).astype(np.uint8)
    tier.put(0, b"a", page)
    found = tier.get(0, b"a")
    assert found is not None
    np.testing.assert_array_equal(found, page)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="spill_folder"):
        SpillTier([4096], 4096, tmp_path / "missing")
    with pytest.raises(ConfigError, match="4095 bytes do not hold one page, which takes 4096"):
        SpillTier([4096], 4095)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="spill_memory"):
        ContextCacheConfig(spill_memory=-1)
    with pytest.raises(ConfigError, match="spill_folder"):
        ContextCacheConfig(spill_folder=__file__)  # type: ignore[arg-type]


def test_restoring_is_chosen_by_what_was_measured() -> None:
    cost = RestoreCost(10)
    assert cost.pays()
    cost.computed(9, 100.0)  # too short to say anything
    cost.restored(2, 2.0)
    assert cost.pays()
    cost.computed(100, 50.0)  # five seconds a page, against one
    assert cost.pays()
    for _ in range(40):
        cost.computed(100, 5.0)
    assert not cost.pays()
    for _ in range(40):
        cost.restored(1, 0.1)
    assert cost.pays()


def computed_for(runtime: LLMRankRuntime, prompt: bytes) -> int:
    before = runtime.prefill_metrics.computed_tokens
    response = runtime.handle_request(ask(list(prompt), 4))
    assert response is not None
    assert response.token_ids == tuple(greedy_reference(list(prompt), 4))
    assert runtime.leaks() == []
    return runtime.prefill_metrics.computed_tokens - before


@pytest.fixture
def paying(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake backend computes so fast that a busy disk may be slower."""
    monkeypatch.setattr(RestoreCost, "pays", lambda _: True)


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.usefixtures("paying")
def test_evicted_pages_come_back_from_the_tier(tmp_path: Path, on_disk: bool) -> None:
    folder = tmp_path if on_disk else None
    runtime, _ = fake_runtime(pages=6, spill=40 * 2 * PAGE, spill_folder=folder)
    prompts = [bytes([letter]) * 30 for letter in b"abcdef"]
    for prompt in prompts:
        assert computed_for(runtime, prompt) == 30
    assert runtime.pool.evicted > 0
    for prompt in prompts:
        assert computed_for(runtime, prompt) == 6
    metrics = runtime.context_cache_metrics
    assert metrics is not None
    assert metrics.restored_pages > 0
    assert metrics.spilled_pages >= metrics.restored_pages / 2


@pytest.mark.usefixtures("paying")
def test_what_is_damaged_or_does_not_pay_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = fake_runtime(pages=6, spill=40 * 2 * PAGE)
    for letter in b"abc":
        computed_for(runtime, bytes([letter]) * 30)
    spill = runtime.context_cache._spill
    assert spill is not None
    with monkeypatch.context() as patch:
        patch.setattr(RestoreCost, "pays", lambda _: False)
        assert computed_for(runtime, b"a" * 30) == 30
    for group in spill._groups:
        group.slots ^= 1
    assert computed_for(runtime, b"b" * 30) == 30
    assert spill.damaged > 0
