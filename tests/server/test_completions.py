"""Completions, driven by the openai package against a real server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from steppe import LLMGenerationRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from tests.server.conftest import Live


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_prompts_may_be_text_ids_or_lists_of_either(
    client: openai.OpenAI, live: Live, rng: np.random.Generator
) -> None:
    texts = ["".join(map(chr, rng.integers(97, 123, rng.integers(1, 9)))) for _ in range(3)]
    ids = [live.llm.tokenizer.encode(text) for text in texts]
    expected = [
        answer.text
        for answer in live.llm.generate(texts, SamplingParams(temperature=0, max_tokens=5))
    ]
    prompts: list[tuple[Any, list[str]]] = [
        (texts[0], expected[:1]),
        (ids[0], expected[:1]),
        (texts, expected),
        (ids, expected),
    ]
    for prompt, answers in prompts:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=5)
        assert [choice.text for choice in answer.choices] == answers
        assert [choice.index for choice in answer.choices] == list(range(len(answers)))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5 * len(answers)


def test_a_stream_of_several_prompts_adds_up(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "tiny",
        "prompt": ["ab", "cd", "e"],
        "max_tokens": 6,
        "n": 2,
        "temperature": 1.0,
        "seed": 5,
        "echo": True,
    }
    whole = client.completions.create(**ask)
    texts = [""] * 6
    reasons: list[Any] = [None] * 6
    usage = None
    for chunk in client.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert reasons[choice.index] is None
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert [text[:2] for text in texts[:4]] == ["ab", "ab", "cd", "cd"]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_named_on_request(client: openai.OpenAI, live: Live, stream: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    wanted = live.llm.generate([5, 6, 7], params)
    ask: dict[str, Any] = {
        "model": "tiny", "prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0, "logprobs": 2,
        "extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True},
    }  # fmt: skip
    if stream:
        parts = [one for event in client.completions.create(**ask, stream=True)
                 for one in event.choices]  # fmt: skip
    else:
        parts = client.completions.create(**ask).choices
        assert parts[0].model_extra is not None
        assert parts[0].model_extra["prompt_token_ids"] == [5, 6, 7]
    ids = [token for part in parts for token in (part.model_extra or {}).get("token_ids", ())]
    assert ids == [*wanted.token_ids]
    spelled = [
        name for part in parts if part.logprobs is not None for name in part.logprobs.tokens or ()
    ]
    assert spelled == [f"token_id:{token}" for token in ids]
    assert wanted.logprobs is not None
    tops = [
        top
        for part in parts
        if part.logprobs is not None
        for top in part.logprobs.top_logprobs or ()
    ]
    assert [set(top) for top in tops] == [
        {f"token_id:{token}" for token, _ in one.top[:2]} | {f"token_id:{one.token_id}"}
        for one in wanted.logprobs
    ]


def test_the_default_length_is_the_openai_one(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="a", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_echo_scores_the_prompt(client: openai.OpenAI, live: Live) -> None:
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=3, echo=True, logprobs=2
    )
    request = LLMGenerationRequest(
        "hello", params=SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2)
    )
    output = live.llm.engine.submit(request).get(30).outputs[0]
    assert output.prompt_logprobs is not None
    assert output.logprobs is not None
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(
        [one.logprob for one in (*output.prompt_logprobs[1:], *output.logprobs) if one]
    )
    assert logprobs.tokens is not None
    assert logprobs.tokens[:5] == list("hello")
    assert logprobs.text_offset == [0, 1, 2, 3, 4, *(logprobs.text_offset or [])[5:]]
    assert answer.choices[0].text.startswith("hello")


def test_only_scoring(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=0, echo=True, logprobs=0
    )
    (choice,) = answer.choices
    assert choice.text == "hello"
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == 5
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_streamed_offsets_run_on(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "logprobs": 1}
    whole = client.completions.create(**ask).choices[0].logprobs
    parts = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(**ask, stream=True)
        if chunk.choices[0].logprobs is not None
    ]
    assert whole is not None
    for name in ("tokens", "text_offset", "token_logprobs"):
        streamed = [item for part in parts for item in getattr(part, name)]
        assert streamed == getattr(whole, name)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"suffix": "end"}, "suffix", "unsupported_value"),
        ({"best_of": 3}, "best_of", "unsupported_value"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo", "unsupported_value"),
        ({"logprobs": 51}, "logprobs", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_type"),
        ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [300]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 40}, "prompt", "unsupported_value"),
        ({"n": 40}, "n", "unsupported_value"),
    ],
)
def test_what_is_wrong_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/completions", body={"model": "tiny", "prompt": "a", **fields}, cast_to=object)
    assert (caught.value.status_code, caught.value.param, caught.value.code) == (400, param, code)
