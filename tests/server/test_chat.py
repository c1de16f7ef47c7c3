"""Chat completions, driven by the openai package against a real server, and chunk by chunk."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from steppe import LLMGenerationRequest, SamplingParams
from steppe.testing import Script
from tests.server.support import chat, settle, staged, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from tests.server.conftest import Live

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello there."},
]


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_is_the_engines_own(client: openai.OpenAI, live: Live) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12)
    expected = live.llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12))
    (choice,) = answer.choices
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.total_tokens == expected.usage.prompt_tokens + 12
    assert answer.model == "tiny"


def test_a_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert [delta.role for delta in deltas[1:]] == [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_n_choices_are_as_sampled_and_differ(client: openai.OpenAI, live: Live, seed: int) -> None:
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 8,
        "n": 3,
        "seed": seed,
        "temperature": 1.0,
    }
    answer = client.chat.completions.create(**ask)
    expected = live.llm.chat(
        MESSAGES, SamplingParams(temperature=1.0, max_tokens=8, n=3, seed=seed)
    )
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts == [output.text for output in expected.outputs]
    assert len(set(texts)) > 1

    streamed = ["", "", ""]
    ended = [0, 0, 0]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            ended[choice.index] += choice.finish_reason is not None
    assert streamed == texts
    assert ended == [1, 1, 1]


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_carry_bytes_and_alternatives(
    client: openai.OpenAI, live: Live, stream: bool
) -> None:
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 3,
    }
    entries: list[Any] = []
    if stream:
        for chunk in client.chat.completions.create(**ask, stream=True):
            if chunk.choices[0].logprobs is not None:
                entries += chunk.choices[0].logprobs.content or []
    else:
        answer = client.chat.completions.create(**ask)
        assert answer.choices[0].logprobs is not None
        entries = answer.choices[0].logprobs.content or []
    expected = live.llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=6, logprobs=3))
    assert expected.logprobs is not None
    assert len(entries) == 6
    for entry, one in zip(entries, expected.logprobs, strict=True):
        assert bytes(entry.bytes) == live.llm.tokenizer.token_bytes(one.token_id)
        assert entry.logprob == pytest.approx(one.logprob)
        assert [alternative.logprob for alternative in entry.top_logprobs] == pytest.approx(
            [logprob for _, logprob in one.top[:3]]
        )
        # Greedy: the sampled token is the likeliest.
        assert entry.top_logprobs[0].bytes == entry.bytes


def test_a_stop_text_ends_the_answer(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24}
    full = client.chat.completions.create(**ask).choices[0].message.content or ""
    stop = next(char for char in full if char.isascii())
    answer = client.chat.completions.create(**ask, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == full[: full.index(stop)]


def test_every_sampling_field_is_accepted(client: openai.OpenAI, rng: np.random.Generator) -> None:
    fields: dict[str, Any] = {
        "top_k": int(rng.integers(1, 50)),
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "include_stop": True,
        "max_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"65": 2.0},
        "seed": -3,
        "n": 1,
        "stop": "zzz",
    }
    assert fields.keys() | {"logprobs", "guided"} == set(SamplingParams.__slots__)
    known = {"temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"}
    known |= {"seed", "n", "stop", "max_tokens"}
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        **{name: value for name, value in fields.items() if name in known},
        extra_body={name: value for name, value in fields.items() if name not in known},
    )
    assert answer.usage is not None
    assert 2 <= answer.usage.completion_tokens <= 4


def test_content_may_be_parts_or_null_beside_calls(client: openai.OpenAI, live: Live) -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Add "}, {"type": "text", "text": "1"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, tools=[tool]
    )
    assert answer.choices[0].message.content is not None


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"top_k": 1.5}, "top_k", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 300, "logprobs": True}, "top_logprobs", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 100}, "n", "unsupported_value"),
        ({"logit_bias": {"AI": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"400": 1}}, "logit_bias[400]", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"stop": [1]}, "stop[0]", "invalid_type"),
        ({"stream_options": {"no": 1}}, "stream_options.no", "unknown_parameter"),
        ({"max_tokenz": 1}, "max_tokenz", "unknown_parameter"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"content": ""}]}, "messages[0].role", "missing_required_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "unsupported_value",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
    ],
)
def test_what_is_wrong_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(
            "/chat/completions",
            body={"model": "tiny", "messages": MESSAGES, **fields},
            cast_to=object,
        )
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"


def test_a_model_that_is_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="huge", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    assert client.models.retrieve("tiny").id == "tiny"
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")


def test_the_async_client_leaves_a_stream_early(live: Live) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                break
            await stream.close()

    before = live.llm.engine.metrics().cancelled
    asyncio.run(main())
    end = time.monotonic() + 20
    while live.llm.engine.metrics().cancelled == before and time.monotonic() < end:
        time.sleep(0.002)
    assert live.llm.engine.metrics().cancelled == before + 1


def test_a_refused_client_comes_back_when_told(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every place is taken, until the first refusal is seen.
    params = SamplingParams(n=live.llm.engine.max_pending, ignore_eos=True)
    held = live.llm.engine.submit(LLMGenerationRequest("a", params=params))
    statuses: list[int] = []
    told: list[str | None] = []
    naps: list[float] = []
    nap = time.sleep

    def short_nap(seconds: float) -> None:
        naps.append(seconds)
        nap(min(seconds, 0.2))

    def watch(response: httpx2.Response) -> None:
        statuses.append(response.status_code)
        told.append(response.headers.get("retry-after-ms"))
        held.cancel()

    monkeypatch.setattr(time, "sleep", short_nap)
    http = httpx2.Client(event_hooks={"response": [watch]})
    with openai.OpenAI(
        base_url=f"{live.url}/v1", api_key="none", max_retries=2, http_client=http
    ) as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert statuses == [429, 200]
    assert int(told[0] or 0) / 1000 in naps


@pytest.mark.anyio
async def test_the_first_chunk_is_written_while_the_rest_is_computed() -> None:
    async with staged(script=Script(length=lambda _: 5)) as stage:
        call = stage.call("/v1/chat/completions", chat(stream=True))
        await settle()
        assert call.status == 200  # decided before any step
        assert call.events == []
        await stage.step()
        assert text_of(call.events).count("<") == 1
        await stage.step(2)
        assert text_of(call.events).count("<") == 3
        await stage.run(call)
        assert call.events[-1] == "[DONE]"
        assert call.headers["content-type"].startswith("text/event-stream")


@pytest.mark.anyio
async def test_a_model_without_a_template_says_so() -> None:
    async with staged(chat=False) as stage:
        call = await stage.ask("/v1/chat/completions", chat())
        assert (call.status, call.error["code"]) == (400, "chat_template_error")
        assert (await stage.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})).status == 200
