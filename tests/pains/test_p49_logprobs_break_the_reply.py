"""P49: logprobs that were infinite, missing or not JSON broke replies. Runtime part: they are the
model's own, finite, and always hold the token that was chosen.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from steppe.backends import sampling_rules
from tests.runtime.asking import ask
from tests.runtime.fakes import fake_runtime, reference_logits

if TYPE_CHECKING:
    from steppe.request import TokenLogprob

CASES: list[dict[str, Any]] = [
    {"top_p": 0.3, "temperature": 1.0, "seed": 1, "logprobs": 5},
    {"top_k": 1, "temperature": 1.0, "seed": 1, "logprobs": 5},
    {"top_k": 1, "temperature": 1.0, "seed": 1, "logprobs": 0},
    {"temperature": 5.0, "seed": 3, "logprobs": 1},
    {"logit_bias": {7: 100.0}, "logprobs": 2},
    {"min_tokens": 5, "stop_token_ids": range(97, 123), "logprobs": 3},
    {"repetition_penalty": 2.0, "presence_penalty": 2.0, "logprobs": 50},
]


@pytest.mark.parametrize("params", CASES, ids=lambda params: ",".join(params))
def test_they_are_the_models_own_and_name_the_chosen_token(params: dict[str, Any]) -> None:
    runtime, _ = fake_runtime()
    response = runtime.handle_request(ask("logprobs", 8, **params))
    assert response is not None
    assert response.logprobs is not None
    assert len(response.logprobs) == len(response.token_ids)
    context = list(b"logprobs")
    for token, one in zip(response.token_ids, response.logprobs, strict=True):
        check(one, token, context, params["logprobs"])
        context.append(token)


def check(one: TokenLogprob, token: int, context: list[int], count: int) -> None:
    own = sampling_rules.logprobs(reference_logits(context))
    assert one.token_id == token
    assert one.logprob == pytest.approx(own[token], abs=1e-5)
    assert token in dict(one.top)
    assert len(one.top) in (count, count + 1)
    values = [value for _, value in one.top]
    assert all(math.isfinite(value) and value <= 0 for value in values)
    assert values[:count] == sorted(values[:count], reverse=True)
    assert sum(map(math.exp, values)) <= 1 + 1e-5
    json.dumps([one.logprob, one.top], allow_nan=False)


def test_the_first_prompt_token_has_none_and_the_others_are_scored() -> None:
    runtime, _ = fake_runtime()
    response = runtime.handle_request(
        ask("echo", 2, prompt_logprobs=3, top_k=1, temperature=1.0, seed=1)
    )
    assert response is not None
    scores = response.outputs[0].prompt_logprobs
    assert scores is not None
    assert len(scores) == 4
    assert scores[0] is None
    for at, one in enumerate(scores[1:], 1):
        assert one is not None
        check(one, b"echo"[at], list(b"echo"[:at]), 3)


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    runtime, backend = fake_runtime()
    response = runtime.handle_request(ask("x", 0, prompt_logprobs=1))
    assert response is not None
    assert response.outputs[0].prompt_logprobs == (None,)
    assert backend.steps == [[1]]
