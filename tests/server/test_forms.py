"""Answers that are held to a form, asked for in every way that clients have."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from steppe import InvalidRequestError
from steppe.request import Guided
from steppe.server.protocol.chat import ChatCompletionRequest
from steppe.server.protocol.completions import CompletionRequest
from tests.server.speaking import Speaker, speaker

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "people": {"enum": [1, 2]}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
FORMS: list[tuple[dict[str, Any], Guided]] = [
    ({"response_format": {"type": "json_object"}}, Guided(json_object=True)),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
        Guided(json_schema=SCHEMA),
    ),
    ({"guided_json": SCHEMA}, Guided(json_schema=SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, Guided(json_schema=SCHEMA)),
    ({"guided_regex": "a+"}, Guided(regex="a+")),
    ({"guided_choice": ["a", "b"]}, Guided(choice=["a", "b"])),
    ({"guided_grammar": 'start: "a"'}, Guided(grammar='start: "a"')),
    ({"guided": {"regex": "a+", "after": "b"}}, Guided(regex="a+", after="b")),
    ({"guided": {"json_object": True}}, Guided(json_object=True)),
    ({"structured_outputs": {"json": SCHEMA}}, Guided(json_schema=SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, Guided(json_object=True)),
    ({"structured_outputs": {"choice": ["a"]}}, Guided(choice=["a"])),
    ({"structured_outputs": {"regex": "a"}}, Guided(regex="a")),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Guided(grammar='start: "a"')),
]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def plain() -> Iterator[Speaker]:
    with speaker("plain") as running:
        yield running


@pytest.mark.parametrize(("fields", "form"), FORMS)
def test_every_name_of_a_form_is_known(fields: dict[str, Any], form: Guided) -> None:
    chat = ChatCompletionRequest.model_validate({"messages": [], **fields})
    completion = CompletionRequest.model_validate({"prompt": "a", **fields})
    assert chat.params({}).guided == form
    assert completion.params({}).guided == form
    assert chat.form_field() == completion.form_field() == next(iter(fields))


def test_text_is_no_form_and_two_forms_are_refused() -> None:
    free = {"messages": [], "response_format": {"type": "text"}}
    assert ChatCompletionRequest.model_validate(free).form() is None
    one = ChatCompletionRequest.model_validate({**free, "guided_regex": "a"})
    assert one.form() == Guided(regex="a")
    two = ChatCompletionRequest.model_validate(
        {"messages": [], "guided_regex": "a", "response_format": {"type": "json_object"}}
    )
    with pytest.raises(InvalidRequestError) as caught:
        two.params({})
    assert caught.value.field == "guided_regex"


def test_a_schema_is_followed_by_a_model_that_would_say_something_else(plain: Speaker) -> None:
    plain.backend.say("I would rather talk about the weather today.")
    answer = plain.chat(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        max_tokens=200,
    )
    (choice,) = answer.choices
    value = json.loads(choice.message.content)
    assert value.keys() == {"city", "people"}
    assert len(value["city"]) <= 8
    assert value["people"] in (1, 2)
    assert choice.finish_reason == "stop"


def test_a_completion_is_held_to_a_form(plain: Speaker) -> None:
    for fields, allowed in (
        ({"guided_choice": ["left", "right"]}, {"left", "right"}),
        ({"guided": {"regex": "yes|no"}}, {"yes", "no"}),
        ({"structured_outputs": {"grammar": 'start: "up" | "down"'}}, {"up", "down"}),
    ):
        answer = plain.client.completions.create(
            model="speaker", prompt=["a", "b"], max_tokens=20, extra_body=fields
        )
        assert {choice.text for choice in answer.choices} <= allowed
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"not": {}}},
                }
            },
            "response_format",
        ),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided": {}}, "guided"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_a_form_that_cannot_be_is_named(plain: Speaker, fields: Any, param: str) -> None:
    for path, body in (
        ("/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/completions", {"prompt": "a"}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            plain.client.post(path, body={**body, **fields}, cast_to=object)
        assert (caught.value.param, caught.value.code) == (param, "invalid_value")
        assert str(caught.value.body["message"]).startswith(f"{param}: ")  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "clock"}},
            },
            "tool_choice",
        ),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ],
)
def test_a_call_that_cannot_be_forced_is_named(plain: Speaker, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        plain.client.chat.completions.create(
            model="speaker", messages=[{"role": "user", "content": "a"}], extra_body=fields
        )
    assert caught.value.param == param
