"""Requests as data: what becomes of messages, tools and sampling fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from steppe import InvalidRequestError, SamplingParams
from steppe.server.protocol.chat import (
    ChatCompletionRequest,
    ChatMessage,
    template_messages,
    template_variables,
)
from steppe.server.protocol.completions import CompletionRequest
from tests.server.support import staged

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object"}, "extra": [1]},
}
TEMPLATE = (
    "{{ tools | tojson if tools else 'no tools' }}|{{ reasoning_effort }}|{{ mood }}|"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %};{% endfor %}"
)


def chat_request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [], **fields})


def messages(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages([ChatMessage.model_validate(turn) for turn in turns])


def test_a_developer_is_a_system_and_nulls_are_absent() -> None:
    assert messages(
        {"role": "developer", "content": "a", "name": None},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
    ) == [
        {"role": "system", "content": "a"},
        {"role": "assistant", "reasoning_content": "hm"},
    ]


@given(st.dictionaries(st.text(), st.integers() | st.text()))
def test_arguments_of_calls_are_objects_for_the_template(arguments: dict[str, Any]) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    (turn,) = messages({"role": "assistant", "tool_calls": [call]})
    assert turn["tool_calls"][0] == {"id": "1", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    "call",
    [
        {"function": {"name": "f", "arguments": '{"a": '}},
        {"function": {"name": "f", "arguments": "[1]"}},
        {"function": {"name": "f", "arguments": "[" * 100_000}},
        {"function": {"name": "f", "arguments": {"a": 1}}},
        {"function": "f"},
        {},
    ],
)
def test_what_cannot_be_opened_stays_as_it_was(call: dict[str, Any]) -> None:
    (turn,) = messages({"role": "assistant", "tool_calls": [call]})
    assert turn["tool_calls"] == [call]


def test_tools_are_given_unless_none_may_be_called() -> None:
    assert chat_request(tools=[TOOL]).template_tools() == [TOOL]
    assert chat_request(tools=[TOOL], tool_choice="auto").template_tools() == [TOOL]
    assert chat_request(tools=[TOOL], tool_choice="none").template_tools() is None
    assert chat_request(tools=[]).template_tools() is None


def test_reserved_variables_are_refused() -> None:
    assert template_variables({"enable_thinking": False}) == {"enable_thinking": False}
    for name in ("messages", "tools", "add_generation_prompt", "not a name", ""):
        with pytest.raises(InvalidRequestError) as caught:
            template_variables({name: 1})
        assert caught.value.field == "chat_template_kwargs"


def test_what_is_absent_comes_from_the_model() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 5}
    assert chat_request(temperature=None).params(defaults) == SamplingParams(
        temperature=0.6, top_k=20, max_tokens=5
    )
    assert chat_request(temperature=0, max_completion_tokens=9).params(defaults) == SamplingParams(
        temperature=0, top_k=20, max_tokens=9
    )
    # What the model does when it is not told makes nothing invalid that a client asks for.
    assert chat_request(min_tokens=8).params(defaults).max_tokens == 8
    completion = CompletionRequest.model_validate({"prompt": "a"})
    assert completion.params({}).max_tokens == 16
    assert completion.params(defaults).max_tokens == 5
    completion = CompletionRequest.model_validate({"prompt": "a", "min_tokens": 30})
    assert completion.params({}).max_tokens == 30


@given(st.integers(-(2**63), 2**64 - 1))
def test_any_seed_of_64_bits_is_one(seed: int) -> None:
    params = chat_request(seed=seed).params({})
    assert params.seed == seed % 2**64


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 1.0, "1", True])
def test_no_other_is(seed: object) -> None:
    with pytest.raises(ValidationError):
        chat_request(seed=seed)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[]], [[]]),
    ],
)
def test_prompts_in_every_shape(prompt: object, prompts: list[object]) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompts() == prompts


@pytest.mark.anyio
async def test_tools_effort_and_variables_reach_the_template() -> None:
    async with staged(template=TEMPLATE) as stage:

        async def prompt(**fields: Any) -> str:
            call = {"function": {"name": "add", "arguments": '{"a": 7}'}}
            turns = [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ]
            seen: list[list[int]] = []
            submit = stage.client.submit

            async def watched(request: Any) -> Any:
                seen.append(list(request.prompt))
                return await submit(request)

            stage.client.submit = watched  # type: ignore[method-assign]
            body = {"messages": turns, "max_tokens": 1, **fields}
            assert (await stage.ask("/v1/chat/completions", body)).status == 200
            stage.client.submit = submit  # type: ignore[method-assign]
            return stage.tokenizer.decode(seen[0])

        plain = await prompt()
        assert plain == "no tools|||user:hi;assistant:7;"
        full = await prompt(
            tools=[TOOL], reasoning_effort="low", chat_template_kwargs={"mood": "fine"}
        )
        tools, effort, mood, rest = full.split("|")
        assert json.loads(tools) == [TOOL]
        assert (effort, mood, rest) == ("low", "fine", "user:hi;assistant:7;")
