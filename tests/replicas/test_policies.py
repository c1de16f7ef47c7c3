"""Placement rules: always one of those offered, repeatable, and as even as they claim."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.errors import ConfigError
from steppe.replicas.policies import (
    POLICIES,
    LeastLoaded,
    PowerOfTwo,
    PrefixAffinity,
    RoundRobin,
    policy_named,
)
from steppe.request import LLMGenerationRequest

if TYPE_CHECKING:
    from steppe.replicas.policies import Policy


@dataclass
class Replica:
    name: str
    score: float = 0.0


def fleet(*scores: float) -> list[Replica]:
    return [Replica(str(number), score) for number, score in enumerate(scores)]


def request(*ids: int) -> LLMGenerationRequest:
    return LLMGenerationRequest(list(ids) or [1])


@pytest.mark.parametrize("name", POLICIES)
@given(scores=st.lists(st.floats(0, 2), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_every_policy_takes_one_of_those_offered_and_is_repeatable(
    name: str, scores: list[float], seed: int
) -> None:
    among = fleet(*scores)

    def run() -> list[str]:
        policy, rng = policy_named(name), Random(seed)
        return [policy.choose(among, request(*range(1, 200)), rng).name for _ in range(5)]

    first = run()
    assert first == run()
    assert set(first) <= {one.name for one in among}


def test_the_least_loaded_gets_it_and_ties_are_shared() -> None:
    rng = Random(1)
    assert LeastLoaded().choose(fleet(0.5, 0.25, 0.75), request(), rng).name == "1"
    among = fleet(0.5, 0.25, 0.25, 0.25)
    counts = Counter(LeastLoaded().choose(among, request(), rng).name for _ in range(3000))
    assert set(counts) == {"1", "2", "3"}
    assert min(counts.values()) > 850


def test_of_two_drawn_the_lower_gets_it() -> None:
    rng = Random(1)
    among = fleet(*[number / 10 for number in range(10)])
    counts = Counter(PowerOfTwo().choose(among, request(), rng).name for _ in range(9000))
    assert "9" not in counts, "the highest never wins a pair"
    shares = [counts[str(number)] for number in range(9)]
    assert shares == sorted(shares, reverse=True)
    assert PowerOfTwo().choose(among[:1], request(), rng) is among[0]


def test_each_has_its_turn() -> None:
    policy = RoundRobin()
    among = fleet(9, 0, 0)
    turns = [policy.choose(among, request(), Random(0)).name for _ in range(6)]
    assert turns == ["0", "1", "2", "0", "1", "2"]


def test_a_prefix_goes_where_it_went_unless_that_one_is_too_busy() -> None:
    policy = PrefixAffinity(max_imbalance=0.25, block=4)
    rng = Random(3)
    among = fleet(0.0, 0.0, 0.0)
    first = policy.choose(among, request(1, 2, 3, 4, 9), rng)
    first.score = 0.25
    for _ in range(5):
        assert policy.choose(among, request(1, 2, 3, 4, 8, 8, 8), rng) is first
    first.score = 0.26
    second = policy.choose(among, request(1, 2, 3, 4, 7), rng)
    assert second is not first
    first.score = 0.0
    assert policy.choose(among, request(1, 2, 3, 4, 7), rng) is second, "it is known there now"


def test_the_longest_known_prefix_decides_and_short_prompts_have_none() -> None:
    policy = PrefixAffinity(block=2)
    rng = Random(3)
    a, b = fleet(0.0, 0.1)
    assert policy.choose([a, b], request(1, 2), rng) is a
    a.score, b.score = 0.2, 0.1
    assert policy.choose([b], request(1, 2, 3, 4), rng) is b
    assert policy.choose([a, b], request(1, 2, 3, 4, 5), rng) is b
    assert policy.choose([a, b], request(1, 2, 9, 9), rng) is b, "the last to have [1, 2]"
    b.score = 0.3
    assert policy.choose([a, b], request(1), rng) is a
    assert policy.choose([a], request(1, 2, 3, 4), rng) is a, "whoever knew it is gone"


def test_texts_and_conversations_have_prefixes_too() -> None:
    rng = Random(0)
    for one, longer in (
        (LLMGenerationRequest("x" * 300), LLMGenerationRequest("x" * 900)),
        (
            LLMGenerationRequest(messages=[{"role": "user", "content": "a"}]),
            LLMGenerationRequest(
                messages=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
            ),
        ),
    ):
        policy = PrefixAffinity()
        among = fleet(0.0, 0.0, 0.0, 0.0)
        first = policy.choose(among, one, rng)
        first.score = 0.2
        assert policy.choose(among, longer, rng) is first


def test_what_is_remembered_is_bounded() -> None:
    policy = PrefixAffinity(block=1, entries=10)
    for number in range(1, 100):
        policy.choose(fleet(0.0), request(*range(number, number + 100)), Random(0))
    assert len(policy._seen) <= 10


def test_policies_have_names() -> None:
    policies: list[Policy] = [policy_named(name) for name in POLICIES]
    assert len({type(policy) for policy in policies}) == 4
    with pytest.raises(ConfigError, match="least-loaded"):
        policy_named("best")
    with pytest.raises(ConfigError):
        PrefixAffinity(max_imbalance=float("nan"))
