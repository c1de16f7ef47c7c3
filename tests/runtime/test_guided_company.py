"""Guided and free requests in one batch, in little room: everybody answers as if alone."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.request import Guided, LLMGenerationRequest, SamplingParams, SequenceOutput
from tests.runtime.fakes import EOS, assert_clean, fake_runtime
from tests.runtime.guides import BRIEF, guide

GUIDES = (
    Guided(json_schema={"type": "array", "items": {"enum": ["ab", 12, None]}, "maxItems": 6}),
    Guided(json_schema={"type": "object", "additionalProperties": {"type": "boolean"}}),
    Guided(choice=["yes", "no", "not at all", "never ever"]),
    Guided(json_schema={"type": "string", "minLength": 12}),
)


@cache
def alone(index: int, seed: int, min_tokens: int, hurried: bool) -> SequenceOutput:
    runtime, _ = fake_runtime(pages=64)
    response = runtime.handle_request(request(index, seed, min_tokens, hurried))
    assert response is not None
    return response.outputs[0]


def request(index: int, seed: int, min_tokens: int, hurried: bool) -> LLMGenerationRequest:
    """One of the guides, or with an index beyond them none."""
    prompt = f"prompt number {seed}"
    bias = BRIEF if hurried else None
    if index < len(GUIDES):
        params = {"seed": seed, "min_tokens": min_tokens, "logit_bias": bias, "logprobs": 1}
        return guide(GUIDES[index], prompt, 40, **params)
    free = SamplingParams(seed=seed, max_tokens=20, stop_token_ids=[EOS], presence_penalty=0.5)
    return LLMGenerationRequest(prompt, params=free)


ASKED = st.tuples(
    st.integers(0, len(GUIDES)), st.integers(0, 5), st.sampled_from([0, 9]), st.booleans()
)


@settings(max_examples=25)
@given(
    asked=st.lists(ASKED, min_size=2, max_size=5),
    pages=st.integers(8, 24),
    max_step_tokens=st.sampled_from([3, 16, 512]),
    overcommit=st.booleans(),
)
def test_everybody_answers_as_if_alone(
    asked: list[tuple[int, int, int, bool]], pages: int, max_step_tokens: int, overcommit: bool
) -> None:
    runtime, _ = fake_runtime(pages=pages, page_size=8, max_step_tokens=max_step_tokens)
    runtime.overcommit = overcommit
    batch = LLMGenerationRequest.batch([request(*one) for one in asked])
    response = runtime.handle_request(batch)
    assert response is not None
    assert_clean(runtime)
    for one, output in zip(asked, response.outputs, strict=True):
        expected = alone(*one)
        assert output.token_ids == expected.token_ids
        assert output.text == expected.text
        assert output.logprobs == expected.logprobs
        assert (output.finish_reason, output.stop_reason) == (
            expected.finish_reason,
            expected.stop_reason,
        )
