"""Reasoning and tool calls over HTTP, said by a model that says what the test wants.

``Speaker.chat`` asks twice, whole and as a stream, and compares.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

from steppe.request import FinishReason
from steppe.server.interpretation import Interpretation
from steppe.text.reasoning.families import QWEN3
from steppe.text.tools.calls import joined_calls
from steppe.text.tools.families import HERMES
from tests.server.speaking import Speaker, speaker

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np


def tool(name: str) -> Any:
    return {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }


WEATHER = tool("weather")
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.fixture(scope="module")
def qwen() -> Iterator[Speaker]:
    with speaker("qwen3") as running:
        yield running


@pytest.fixture(scope="module")
def llama() -> Iterator[Speaker]:
    with speaker("llama3") as running:
        yield running


@pytest.fixture(scope="module")
def deepseek() -> Iterator[Speaker]:
    with speaker("deepseek") as running:
        yield running


def calls_of(answer: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in answer.choices[0].message.tool_calls or ()
    ]


def test_reasoning_and_answer_are_told_apart(qwen: Speaker) -> None:
    qwen.backend.say("<think>\nHmm, été.\n</think>\n\nIt is <think> that.")
    (choice,) = qwen.chat().choices
    assert choice.message.reasoning_content == "Hmm, été.\n"
    assert choice.message.content == "It is <think> that."
    assert choice.finish_reason == "stop"


def test_reasoning_that_the_template_began_or_ended(deepseek: Speaker, qwen: Speaker) -> None:
    deepseek.backend.say("Hmm.\n</think>\nYes.", opened="<think>\n")
    (choice,) = deepseek.chat().choices
    assert (choice.message.reasoning_content, choice.message.content) == ("Hmm.\n", "Yes.")

    qwen.backend.say("<think> it is.", opened="<think>\n\n</think>\n\n")
    (choice,) = qwen.chat(extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices
    assert (choice.message.reasoning_content, choice.message.content) == (None, "<think> it is.")


def test_reasoning_that_is_cut_off_is_no_content(qwen: Speaker) -> None:
    qwen.backend.say("<think>Hmm, let me see</think>Yes.")
    (choice,) = qwen.chat(max_tokens=15).choices
    assert choice.message.reasoning_content == "Hmm, let"
    assert choice.message.content == ""
    assert choice.finish_reason == "length"


def test_calls_behind_reasoning_and_words(qwen: Speaker) -> None:
    other = '{"name": "clock", "arguments": {}}'
    qwen.backend.say(
        f"<think>Hm {TAGGED}</think>\nI look.\n{TAGGED}\n<tool_call>{other}</tool_call>"
    )
    answer = qwen.chat(tools=[WEATHER, tool("clock")])
    message = answer.choices[0].message
    assert message.reasoning_content == f"Hm {TAGGED}"
    assert message.content.strip() == "I look."
    assert calls_of(answer) == [("weather", {"city": "Oslo"}), ("clock", {})]
    assert len({call.id for call in message.tool_calls}) == 2
    assert answer.choices[0].finish_reason == "tool_calls"

    answer = qwen.chat(tools=[WEATHER, tool("clock")], parallel_tool_calls=False)
    assert calls_of(answer) == [("weather", {"city": "Oslo"})]
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_call_is_content_where_none_may_be(qwen: Speaker) -> None:
    qwen.backend.say(TAGGED)
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        (choice,) = qwen.chat(**fields).choices
        assert choice.message.content == TAGGED
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_content_is_null_beside_calls_alone_and_every_choice_calls(qwen: Speaker) -> None:
    qwen.backend.say(TAGGED)
    answer = qwen.chat(tools=[WEATHER], n=3)
    for choice in answer.choices:
        assert choice.message.content is None
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 3


def test_a_tag_that_is_a_control_token(llama: Speaker) -> None:
    parameters = CALL.replace("arguments", "parameters")
    for text in (f"<|python_tag|>{parameters}", parameters):
        llama.backend.say(text)
        answer = llama.chat(tools=[WEATHER])
        assert calls_of(answer) == [("weather", {"city": "Oslo"})]
        assert answer.choices[0].message.content is None
        assert answer.choices[0].finish_reason == "tool_calls"
    llama.backend.say("<|python_tag|>none")
    assert llama.chat().choices[0].message.content == "none"


@pytest.mark.parametrize("stops", [None, ["zzz"]])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": WEATHER}])
def test_a_call_is_forced_on_a_model_that_would_talk(
    llama: Speaker, choice: Any, stops: Any
) -> None:
    if choice != "required":
        choice = {"type": "function", "function": {"name": "weather"}}
    llama.backend.say("I would rather talk about something else.")
    offered = [WEATHER] if choice == "required" else [tool("clock"), WEATHER]
    answer = llama.chat(tools=offered, tool_choice=choice, stop=stops, max_tokens=200)
    ((name, arguments),) = calls_of(answer)
    assert name == "weather"
    assert arguments.keys() == {"city"}
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_form_begins_behind_the_reasoning(qwen: Speaker, deepseek: Speaker) -> None:
    form: Any = {"type": "json_object"}
    qwen.backend.say('<think>Hm.</think>{"a": 1}')
    (choice,) = qwen.chat(response_format=form).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", '{"a": 1}')

    deepseek.backend.say(f"Hm.</think>{CALL}", opened="<think>\n")
    answer = deepseek.chat(tools=[WEATHER], tool_choice="required")
    assert answer.choices[0].message.reasoning_content == "Hm."
    assert calls_of(answer) == [("weather", {"city": "Oslo"})]

    # Where there is no reasoning, the form begins at once.
    qwen.backend.say("<think>", opened="<think>\n\n</think>\n\n")
    answer = qwen.chat(
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=200,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert [name for name, _ in calls_of(answer)] == ["weather"]


def test_a_form_does_not_wait_for_reasoning_that_may_never_come() -> None:
    with speaker("instruct") as instruct:
        instruct.backend.say("I would rather talk.")
        (choice,) = instruct.chat(extra_body={"guided_choice": ["yes", "no"]}).choices
        assert choice.message.content in ("yes", "no")
        # Without a form its answer may begin with reasoning.
        instruct.backend.say("<think>Hm.</think>Yes.")
        (choice,) = instruct.chat().choices
        assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "Yes.")


def test_a_form_leaves_no_room_for_a_call(llama: Speaker) -> None:
    llama.backend.say(CALL)
    (choice,) = llama.chat(tools=[WEATHER], response_format={"type": "json_object"}).choices
    assert choice.message.content == CALL
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("forced", [True, False])
def test_what_is_cut_off_is_no_whole_call(
    qwen: Speaker, rng: np.random.Generator, forced: bool
) -> None:
    """P55: whatever the limit, the reason is ``tool_calls`` only for calls that are whole."""
    extra: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    text = CALL if forced else TAGGED
    qwen.backend.say(text, opened="<think>\n\n</think>\n\n")
    limits = {len(text) - 1, len(text), len(text) + 1, *rng.integers(1, len(text), 3).tolist()}
    for limit in limits:
        answer = qwen.chat(
            tools=[WEATHER],
            tool_choice="required" if forced else "auto",
            max_tokens=limit,
            extra_body=extra,
        )
        (choice,) = answer.choices
        whole = limit > len(text)
        assert choice.finish_reason == ("tool_calls" if whole else "length"), limit
        if whole:
            assert calls_of(answer) == [("weather", {"city": "Oslo"})]
        elif limit < len(text):
            content = choice.message.content or ""
            if choice.message.tool_calls is None:
                assert content == text[:limit]
                continue
            (call,) = choice.message.tool_calls
            assert text[:limit].endswith(call.function.arguments + content)
            with pytest.raises(json.JSONDecodeError):
                json.loads(call.function.arguments)


@pytest.mark.parametrize("forced", [True, False])
def test_arguments_are_told_while_they_arrive(qwen: Speaker, forced: bool) -> None:
    said = CALL if forced else TAGGED
    qwen.backend.say(said, opened="<think>\n\n</think>\n\n")
    go_on = qwen.backend.hold(said.index("slo"))
    stream: Any = qwen.client.chat.completions.create(
        model="speaker",
        messages=[{"role": "user", "content": "speak"}],
        temperature=0,
        tools=[WEATHER],
        tool_choice="required" if forced else "auto",
        stream=True,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    calls = []
    for chunk in stream:
        for choice in chunk.choices:
            calls += choice.delta.tool_calls or ()
        if any(call.function.arguments for call in calls):
            go_on.set()  # the end of the call is not said before its beginning is read
    first, *others = calls
    assert (first.function.name, first.type, first.index) == ("weather", "function", 0)
    assert first.id
    assert all((one.id, one.function.name, one.index) == (None, None, 0) for one in others)
    assert len([one for one in calls if one.function.arguments]) > 1
    assert "".join(one.function.arguments for one in calls) == '{"city": "Oslo"}'


def test_logprobs_of_a_stream_are_complete_although_text_is_held_back(qwen: Speaker) -> None:
    qwen.backend.say(f"<think>Hm</think>{TAGGED}")
    ask: dict[str, Any] = {
        "model": "speaker",
        "messages": [{"role": "user", "content": "speak"}],
        "temperature": 0,
        "tools": [WEATHER],
        "logprobs": True,
    }
    whole = qwen.client.chat.completions.create(**ask).choices[0]
    assert whole.logprobs is not None
    tokens = [entry.token for entry in whole.logprobs.content or ()]
    assert "".join(tokens).startswith(f"<think>Hm</think>{TAGGED}")
    streamed = [
        entry.token
        for chunk in qwen.client.chat.completions.create(**ask, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed == tokens


def test_however_a_text_is_cut_it_is_read_alike(rng: np.random.Generator) -> None:
    answers = Interpretation(QWEN3, HERMES, {"weather"})
    text = f" <think> Hm </think> ok <tool_call> no {TAGGED}\n{TAGGED} <tool_call>{CALL}"
    for reason in (FinishReason.STOP, FinishReason.LENGTH):
        whole = answers.message(text, reason)
        reader = answers.reader()
        cuts = [0, *sorted(rng.integers(0, len(text), 8).tolist()), len(text)]
        parts = [
            part for start, end in itertools.pairwise(cuts) for part in reader.push(text[start:end])
        ]
        parts += reader.finish(reason)
        assert "".join(part.reasoning for part in parts) == whole.reasoning == "Hm "
        assert "".join(part.content for part in parts) == whole.content
        assert joined_calls(call for part in parts for call in part.calls) == whole.calls
        stopped = reason is FinishReason.STOP
        assert [call.complete for call in whole.calls] == [True, True, stopped]
        assert reader.finish_reason(reason) == whole.finish_reason
