"""Promise 4 over the spill tier, on real backends: pages that were copied out and back again, of
every type that keys and values are kept as, hold what was computed to the bit.

Restoring is forced: otherwise what was measured decides, and a tiny model computes faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe import EngineConfig, RequestEngine
from steppe.errors import RequestCancelledError
from steppe.runtime.inference_runtime import LLMInferenceRuntime
from steppe.runtime.kv.spill import RestoreCost
from tests.property.real_engines import LONGEST, draw_requests, page_size_of, rank_for
from tests.runtime.asking import ask
from tests.runtime.fakes import assert_clean
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from steppe import LLMGenerationRequest, LLMGenerationResponse
    from steppe.runtime.rank_runtime import LLMRankRuntime

KINDS = [
    ("native", "bfloat16"),
    ("native", "float16"),
    ("native", "int8"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch", "float16"),
    ("torch", "int8"),
]
"""A backend's name, and what it keeps keys and values as: all that there is."""
QUICK = [*KINDS[:3], ("torch", "float32")]
"""Those that random mixes go over in every run; the fixed example goes over all."""
SEATS = 6
LONG_ENOUGH = 20_000
"""Ticks within which eight short requests must have ended."""


@pytest.fixture(scope="module", autouse=True)
def always_restored() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RestoreCost, "pays", lambda _: True)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tier's file goes."""
    return tmp_path_factory.mktemp("tier")


@pytest.fixture(scope="module", params=["one group", "a windowed group"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    window = None if request.param == "one group" else 37
    return write_tiny_model(tmp_path_factory.mktemp("spilled") / "tiny", window=window)


@dataclass(frozen=True)
class Room:
    """A pool with room for the longest sequence and ``more`` pages, and a tier beside it."""

    more: int
    spilled_pages: int
    on_disk: bool
    chunk: int
    damage: bool


def rooms() -> st.SearchStrategy[Room]:
    return st.builds(
        Room,
        more=st.integers(0, 4),
        spilled_pages=st.sampled_from([1, 3, 200]),
        on_disk=st.booleans(),
        chunk=st.sampled_from([7, 40, 300]),
        damage=st.sampled_from([False, False, True]),
    )


def answers_alone(
    model: Path, kind: tuple[str, str], requests: list[LLMGenerationRequest]
) -> list[LLMGenerationResponse]:
    """Each by itself, without a cache."""
    rank = rank_for(model, *kind, seats=SEATS, cached=False)
    answers = []
    for request in requests:
        answer = rank.handle_request(request)
        assert answer is not None
        answers.append(answer)
    return answers


def restored(rank: LLMRankRuntime) -> int:
    metrics = rank.context_cache_metrics
    assert metrics is not None
    return metrics.restored_pages


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
@pytest.mark.parametrize("on_disk", [True, False], ids=["disk", "memory"])
def test_restored_pages_go_on_to_the_same_tokens(
    model: Path, kind: tuple[str, str], folder: Path, on_disk: bool, rng: np.random.Generator
) -> None:
    size = page_size_of(kind[0])
    kept = 130 // size
    # Each overwrites all that the one before it left, the pages of its answer too.
    requests = [ask(rng.integers(0, 256, 130).tolist(), 14, logprobs=3) for _ in range(3)]
    alone = answers_alone(model, kind, requests)
    rank = rank_for(
        model,
        *kind,
        pages=-(-144 // size),
        spilled_pages=3 * 144 // size,
        spill_folder=folder if on_disk else None,
    )
    for number in range(2 * len(requests)):
        one = number % len(requests)
        before, computed = restored(rank), rank.prefill_metrics.computed_tokens
        answer = rank.handle_request(requests[one])
        assert answer is not None
        assert answer.outputs == alone[one].outputs
        if number >= len(requests):
            assert restored(rank) - before >= kept, "its pages were not copied back"
            assert rank.prefill_metrics.computed_tokens - computed == 130 - kept * size
            assert answer.usage.cached_tokens == kept * size
        rank.pool.verify()
    assert_clean(rank)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in KINDS],
    ids=map(" ".join, KINDS),
)
@pytest.mark.timeout(600)
@settings(max_examples=3)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(3, 8),
    room=rooms(),
    leave=st.dictionaries(st.integers(0, 7), st.integers(0, 60), max_size=3),
)
def test_random_mixes_are_answered_as_without_a_cache(
    model: Path,
    kind: tuple[str, str],
    folder: Path,
    seed: int,
    count: int,
    room: Room,
    leave: dict[int, int],
) -> None:
    rng = np.random.default_rng(seed)
    requests = draw_requests(rng, count)
    alone = answers_alone(model, kind, requests)
    rank = rank_for(
        model,
        *kind,
        pages=-(-LONGEST // page_size_of(kind[0])) + room.more,
        seats=SEATS,
        spilled_pages=room.spilled_pages,
        spill_folder=folder if room.on_disk else None,
    )
    runtime = LLMInferenceRuntime(rank)
    runtime.set_overcommit(True)
    config = EngineConfig(max_batch_size=SEATS, max_step_tokens=room.chunk)
    engine = RequestEngine.from_factory(runtime.begin_stepped, config, manual=True)
    for again in (False, True, True):
        order = rng.permutation(count).tolist()
        handles = {number: engine.submit(requests[number]) for number in order}
        tick = 0
        while engine.tick():
            rank.pool.verify()
            tick += 1
            assert tick < LONG_ENOUGH, "it does not end"
            if not again:
                for number in [one for one, when in leave.items() if when == tick and one < count]:
                    handles[number].cancel()
        for number, handle in handles.items():
            try:
                answer = handle.get(timeout=0)
            except RequestCancelledError:
                assert not again
                assert number in leave
                continue
            assert answer.outputs == alone[number].outputs, number
        if room.damage:
            damage(rank, rng)
    metrics = engine.metrics()
    assert metrics.failed == 0
    assert_clean(rank)
    assert engine.leaks() == []
    engine.shutdown()


def damage(rank: LLMRankRuntime, rng: np.random.Generator) -> None:
    """Turn a bit of every other copy."""
    spill = rank.context_cache._spill
    assert spill is not None
    for group in spill._groups:
        for slot in range(0, len(group.slots), 2):
            group.slots[slot, int(rng.integers(group.slots.shape[1]))] ^= 4
