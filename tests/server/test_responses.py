"""OpenAI's Responses API, driven by the openai package; the model says what a test wants."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from steppe.request import Guided
from steppe.server.protocol.responses import ResponsesRequest
from tests.server.speaking import Speaker, speaker
from tests.server.support import settle, staged

if TYPE_CHECKING:
    from collections.abc import Iterator

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
OFF: Any = {"chat_template_kwargs": {"enable_thinking": False}}
NO_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def qwen() -> Iterator[Speaker]:
    with speaker("qwen3") as running:
        yield running


def said(response: Any) -> dict[str, Any]:
    """A response without its ids and times."""
    plain: dict[str, Any] = response.to_dict()
    usage = plain.pop("usage")
    for name in ("id", "created_at", "completed_at"):
        plain.pop(name, None)
    for item in plain["output"]:
        item.pop("id")
        item.pop("call_id", None)
    plain["tokens"] = (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"])
    return plain


def ask(qwen: Speaker, **fields: Any) -> Any:
    """A response, and the same one as the last event of a stream, which is equal."""
    fields = {"model": "speaker", "input": "speak", "temperature": 0, **fields}
    whole = qwen.client.responses.create(**fields)
    events: list[Any] = list(qwen.client.responses.create(**fields, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert said(last) == said(whole)

    # What the events say one by one adds up to the output of the last.
    items: dict[int, Any] = {}
    grown: dict[str, str] = {}
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            items[event.output_index] = None
        elif event.type.endswith(".delta"):
            grown[event.item_id] = grown.get(event.item_id, "") + event.delta
        elif event.type == "response.output_item.done":
            items[event.output_index] = event.item.to_dict()
    assert list(items.values()) == [item.to_dict() for item in last.output]
    for item in last.output:
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert grown.pop(item.id) == text
    assert not grown
    return whole


def test_an_answer_in_words(qwen: Speaker) -> None:
    qwen.backend.say("It is été.", opened=NO_THOUGHT)
    response = ask(qwen, extra_body=OFF, instructions="Be brief.", metadata={"a": "b"})
    assert response.output_text == "It is été."
    assert (response.status, response.model) == ("completed", "speaker")
    assert response.instructions == "Be brief."
    assert response.metadata == {"a": "b"}
    assert response.usage.total_tokens == response.usage.input_tokens + 13
    cut = ask(qwen, extra_body=OFF, max_output_tokens=5)
    assert (cut.output_text, cut.status) == ("It is", "incomplete")
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].status == "incomplete"


def test_thoughts_words_and_calls_are_items(qwen: Speaker) -> None:
    qwen.backend.say(f"<think>Hm.</think>I look.{CALL}{CALL}")
    response = ask(qwen, tools=[WEATHER])
    thought, text, *calls = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
    assert (text.type, response.output_text) == ("message", "I look.")
    assert [(call.type, call.name) for call in calls] == [("function_call", "weather")] * 2
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Oslo"}] * 2
    assert len({call.call_id for call in calls}) == 2
    assert len(ask(qwen, tools=[WEATHER], parallel_tool_calls=False).output) == 3


def test_a_call_that_is_cut_off_is_incomplete(qwen: Speaker) -> None:
    qwen.backend.say(CALL, opened=NO_THOUGHT)
    response = ask(qwen, tools=[WEATHER], extra_body=OFF, max_output_tokens=CALL.index("lo") + 2)
    (call,) = response.output
    assert (response.status, call.status) == ("incomplete", "incomplete")
    assert (call.name, call.arguments) == ("weather", '{"city": "Oslo')


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_is_forced(qwen: Speaker, choice: Any) -> None:
    qwen.backend.say("I would rather talk.", opened=NO_THOUGHT)
    response = ask(qwen, tools=[WEATHER], tool_choice=choice, extra_body=OFF)
    (call,) = response.output
    assert list(json.loads(call.arguments)) == ["city"]


def test_a_format_is_kept(qwen: Speaker) -> None:
    qwen.backend.say("I would rather talk.", opened=NO_THOUGHT)
    schema = WEATHER["parameters"]
    form = {"type": "json_schema", "name": "place", "schema": schema, "strict": True}
    response = ask(qwen, text={"format": form}, extra_body=OFF)
    assert list(json.loads(response.output_text)) == ["city"]
    assert response.text.format.name == "place"
    body = ResponsesRequest.model_validate({"input": "a", "text": {"format": form}})
    assert body.chat().form() == Guided(json_schema=schema)


def test_a_conversation_of_items_is_what_a_template_expects() -> None:
    body = ResponsesRequest.model_validate(
        {
            "instructions": "Be brief.",
            "reasoning": {"effort": "low", "summary": None},
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
                },
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "ok"},
                {"role": "user", "content": "So?"},
            ],
        }
    ).chat()
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert [turn.model_dump(exclude_none=True) for turn in body.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
        {"role": "user", "content": "So?"},
    ]
    assert body.reasoning_effort == "low"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": []}, "input", "invalid_value"),
        ({"input": None}, "input", "invalid_type"),
        ({"input": [{"role": "user"}]}, "input[0].content", "invalid_value"),
        ({"input": [{"content": "a"}]}, "input[0].role", "invalid_value"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "unsupported_value",
        ),
        ({"input": [{"type": "item_reference"}]}, "input[0].type", "unsupported_value"),
        ({"input": [{"type": "function_call"}]}, "input[0].name", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "invalid_value"),
        ({"background": True}, "background", "invalid_value"),
        ({"n": 2}, "n", "unsupported_value"),
        ({"no_such_field": 1}, "no_such_field", "unknown_parameter"),
    ],
)
def test_what_is_wrong_is_named(qwen: Speaker, fields: Any, param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        qwen.client.post("/responses", body={"input": "a", **fields}, cast_to=object)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.anyio
async def test_a_stream_that_is_cancelled_ends_as_failed() -> None:
    async with staged() as stage:
        call = stage.call("/v1/responses", {"input": "a", "stream": True})
        await settle()
        assert call.status == 200
        await stage.step()
        stage.client.cancel_all()
        await stage.run(call)
        last = call.body.decode().strip().split("\n\n")[-1]
        assert last.startswith("event: response.failed\ndata: ")
        assert "response.completed" not in call.body.decode()
