from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.request import SamplingParams
from steppe.text.generation_defaults import generation_defaults

KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_new_tokens",
    "max_length",
    "do_sample",
    "eos_token_id",
    "typical_p",
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "max_length": 20}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0},
        ),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        (
            {"max_new_tokens": 128, "repetition_penalty": 1.05},
            {"max_tokens": 128, "repetition_penalty": 1.05},
        ),
        ({"temperature": None, "top_p": 0.0, "top_k": 2.5, "min_p": "0.1"}, {}),
        ({"temperature": float("nan"), "top_p": 1.5, "max_new_tokens": 0, "top_k": True}, {}),
    ],
)
def test_defaults(config: dict[str, Any], expected: dict[str, float]) -> None:
    assert generation_defaults(config) == expected


numbers = st.one_of(st.integers(-(2**40), 2**40), st.floats(), st.floats(0, 2))
values = st.one_of(numbers, numbers, st.none(), st.booleans(), st.text(max_size=3))


@given(config=st.dictionaries(st.sampled_from(KEYS), values))
def test_defaults_never_make_a_request_invalid(config: dict[str, Any]) -> None:
    defaults = generation_defaults(config)
    params = SamplingParams(**defaults)
    assert json.loads(json.dumps(defaults)) == defaults
    for name, value in defaults.items():
        assert getattr(params, name) == value or (name == "top_k" and value == -1)
