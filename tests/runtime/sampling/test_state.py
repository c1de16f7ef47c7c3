"""What sampling remembers of a sequence, against plain Python."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.backends.base import SAMPLE_ROW, DrawPurpose
from steppe.request import SamplingParams
from steppe.runtime.sampling.state import SamplerState, TokenCounts

TOKENS = st.lists(st.integers(0, 400), max_size=200)


@given(prompt=TOKENS, output=TOKENS)
def test_token_counts_are_those_of_a_counter(prompt: list[int], output: list[int]) -> None:
    counts = TokenCounts(prompt)
    for token in output:
        counts.add(token)
    view = counts.view()
    ids = view.token_ids.tolist()
    assert sorted(ids) == sorted({*prompt, *output})
    expected = Counter(output)
    assert view.counts.tolist() == [expected[token] for token in ids]
    assert view.in_prompt.tolist() == [token in set(prompt) for token in ids]


def state(params: SamplingParams, **changes: Any) -> SamplerState:
    given: dict[str, Any] = {
        "seed": 9,
        "sequence_index": 2,
        "prompt": (1, 2, 1),
        "generated": (),
        "stop_token_ids": frozenset({5, 3}),
    }
    return SamplerState(params, **(given | changes))


def row_of(sampler: SamplerState) -> np.void:
    return np.frombuffer(sampler.row, SAMPLE_ROW)[0]


def test_a_row_carries_every_parameter() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logprobs=4,
        seed=11,
    )
    row = row_of(state(params, seed=2**64 - 1))
    expected = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "num_logprobs": 4,
        "seed": 2**64 - 1,
        "sequence_index": 2,
        "purpose": DrawPurpose.TARGET,
        "target": -1,
        "reserved": 0,
    }
    assert {name: row[name].item() for name in expected} == expected
    assert row_of(state(SamplingParams()))["num_logprobs"] == -1
    assert row_of(state(SamplingParams(logprobs=0)))["num_logprobs"] == 0


def test_nothing_is_kept_that_nothing_needs() -> None:
    plain = state(SamplingParams(temperature=0.3, top_p=0.5, logprobs=2))
    assert plain.plain
    assert (plain.bias, plain.history, plain.banned) == (None, None, None)


def test_bias_is_ids_and_values() -> None:
    biased = state(SamplingParams(logit_bias={7: 1.5, 2: -3.0}))
    assert not biased.plain
    assert biased.bias is not None
    ids, values = biased.bias
    assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == {7: 1.5, 2: -3.0}
    assert (ids.dtype, values.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=-0.1),
        SamplingParams(frequency_penalty=0.1),
    ],
)
def test_any_penalty_keeps_a_history_of_prompt_and_output(params: SamplingParams) -> None:
    sampler = state(params, generated=(4, 1))
    sampler.add(4)
    assert not sampler.plain
    history = sampler.history
    assert history is not None
    assert history.token_ids.tolist() == [1, 2, 4]
    assert history.counts.tolist() == [1, 0, 2]
    assert history.in_prompt.tolist() == [True, True, False]


def test_stops_are_banned_until_min_tokens_exist() -> None:
    sampler = state(SamplingParams(min_tokens=2))
    for _ in range(2):
        assert sampler.banned is not None
        assert sampler.banned.tolist() == [3, 5]
        sampler.add(8)
    assert sampler.banned is None


def test_tokens_generated_before_a_preemption_count() -> None:
    assert state(SamplingParams(min_tokens=2), generated=(8, 9)).banned is None
    assert state(SamplingParams(min_tokens=2), generated=(8,)).banned is not None
    assert state(SamplingParams(min_tokens=2), stop_token_ids=frozenset()).plain
