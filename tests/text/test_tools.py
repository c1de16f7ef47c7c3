"""Tool calls: found whole or not at all, whatever way the text is cut, and nothing else is lost."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steppe.errors import InvalidRequestError
from steppe.text.tags import partial_tag
from steppe.text.tools.calls import JsonEnd, ToolCall, read_calls
from steppe.text.tools.families import (
    FORCED,
    HERMES,
    LLAMA3,
    MISTRAL,
    forced_call_schema,
    tool_format,
)
from steppe.text.tools.parser import ToolFormat, ToolParser
from tests.text.chunks import cut

OFFERED = ("f", "get_weather")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\{}[]<>/é\n', max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.text("xy}\"'", max_size=3), JSON, max_size=3)
CALLS = st.builds(lambda name, arguments: (name, arguments), st.sampled_from(OFFERED), ARGUMENTS)

Events = list[str | ToolCall]


def parse(
    form: ToolFormat, pieces: list[str], *, truncated: bool = False, offered: Any = OFFERED
) -> Events:
    """Calls in order, with all the content between two of them as one string."""
    parser = ToolParser(form, offered)
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.flush(truncated=truncated)
    events: Events = []
    for part in parts:
        if part.content:
            if events and isinstance(events[-1], str):
                events[-1] += part.content
            else:
                events.append(part.content)
        for piece in part.calls:
            if piece.name:
                events.append(ToolCall(piece.name, piece.arguments, piece.complete))
                continue
            begun = events.pop()  # its parts are not mixed with anything else
            assert isinstance(begun, ToolCall)
            assert not begun.complete
            events.append(ToolCall(begun.name, begun.arguments + piece.arguments, piece.complete))
    assert parser.found == sum(isinstance(event, ToolCall) for event in events)
    return events


def call(name: str, arguments: dict[str, Any] | None = None) -> ToolCall:
    return ToolCall(name, json.dumps(arguments or {}, ensure_ascii=False))


def hermes(name: str, arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


X = '{"name": "f", "arguments": {"x": 1}}'
Y = '{"name": "f", "parameters": {"x": 1}}'
F = call("f", {"x": 1})
PART = ToolCall("f", '{"x": 1', complete=False)


@pytest.mark.parametrize(
    ("form", "text", "events"),
    [
        (HERMES, f"<tool_call>\n{X}\n</tool_call>", [F]),
        (HERMES, f"Let me see. <tool_call>{X}</tool_call>", ["Let me see. ", F]),
        (HERMES, f"\n<tool_call>{X}</tool_call>\n<tool_call>{Y}</tool_call>\n", [F, F]),
        (HERMES, f"<tool_call>{X}</tool_call> and then", [F, " and then"]),
        (HERMES, X, [X]),
        (HERMES, "  ", ["  "]),
        (HERMES, "a < b <tool", ["a < b <tool"]),
        (HERMES, "<tool_call>no JSON</tool_call>", ["<tool_call>no JSON</tool_call>"]),
        (HERMES, "<tool_call>{}</tool_call>", ["<tool_call>{}</tool_call>"]),
        (HERMES, "<tool_call>{x}</tool_call>", ["<tool_call>{x}</tool_call>"]),
        (HERMES, f"<tool_call>{X} more</tool_call>", [PART, "}} more</tool_call>"]),
        (HERMES, f"<tool_call>{X}\n</tool", [F]),
        (HERMES, f"<tool_call>{X[:-1]}", [PART, "}"]),
        (HERMES, '<tool_call>{"arguments": {}, "name": "f"}</tool_call>', [call("f")]),
        (
            HERMES,
            '<tool_call>{"arguments": {}, "name": "f"',
            ['<tool_call>{"arguments": {}, "name": "f"'],
        ),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"x": nan}}</tool_call>!',
            [ToolCall("f", '{"x": nan', complete=False), "}}</tool_call>!"],
        ),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"x": 1}, "name": "g"}</tool_call>',
            [PART, '}, "name": "g"}</tool_call>'],
        ),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"x": 1}, "id": 3}</tool_call>',
            [F],
        ),
        (HERMES, f"<tool_call>x<tool_call>{X}</tool_call>", ["<tool_call>x", F]),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
            [call("f", {"x": "</tool_call>"})],
        ),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>',
            [F],
        ),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', [call("f")]),
        (HERMES, '<tool_call>{"name": "unknown"}</tool_call>', [call("unknown")]),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": NaN}</tool_call>',
            ['<tool_call>{"name": "f", "arguments": NaN}</tool_call>'],
        ),
        (LLAMA3, Y, [F]),
        (LLAMA3, f" <|python_tag|>{Y}", [F]),
        (LLAMA3, f"{Y}; {Y}", [F, F]),
        (LLAMA3, f'{{"type": "function", "function": {Y}}}', [F]),
        (LLAMA3, f"I say {Y}", [f"I say {Y}"]),
        (LLAMA3, '{"name": "nobody", "parameters": {}}', ['{"name": "nobody", "parameters": {}}']),
        (LLAMA3, '{"answer": [1, 2]} x', ['{"answer": [1, 2]} x']),
        (LLAMA3, '<|python_tag|>f.call(query="x")', ['<|python_tag|>f.call(query="x")']),
        (LLAMA3, Y[:-2], [PART]),
        (MISTRAL, f"[TOOL_CALLS] [{X}, {X}]", [F, F]),
        (MISTRAL, f"[TOOL_CALLS][{X}]", [F]),
        (MISTRAL, f"[{X}]", [F]),
        (MISTRAL, f"Well: [TOOL_CALLS] [{X}]", ["Well: ", F]),
        (MISTRAL, "[1, 2]", ["[1, 2]"]),
        (MISTRAL, "[TOOL", ["[TOOL"]),
        (MISTRAL, "[TOOL_CALLS] []", ["[TOOL_CALLS] []"]),
        (FORCED, X, [F]),
        (FORCED, X[:-2], [PART]),
        (FORCED, "plain", ["plain"]),
    ],
)
def test_what_is_a_call_and_what_is_not(form: ToolFormat, text: str, events: Events) -> None:
    assert parse(form, [text]) == events
    assert parse(form, list(text)) == events


@given(data=st.data())
def test_calls_between_words_are_found_in_any_cut(data: st.DataObject) -> None:
    words = st.sampled_from(["Look: ", "a < b", "<tool>", "{}", "</tool_call>", "x<tool_call"])
    text, expected = "", []
    for segment in data.draw(st.lists(words | CALLS, max_size=5)):
        if isinstance(segment, str):
            text += segment
            if expected and isinstance(expected[-1], str):
                expected[-1] += segment
            else:
                expected.append(segment)
        else:
            text += hermes(*segment)
            expected.append(call(*segment))
    assert parse(HERMES, data.draw(cut(text))) == expected


@given(data=st.data(), form=st.sampled_from([HERMES, LLAMA3, MISTRAL, FORCED]))
def test_any_text_gives_the_same_in_any_cut(data: st.DataObject, form: ToolFormat) -> None:
    scraps = [form.start, form.end, form.start[:3], "{", "}", "[", "]", '"', "\\", " ", ";", "a"]
    scraps += [X, Y, f"[{X}]", "\n"]
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=8)))
    truncated = data.draw(st.booleans())
    whole = parse(form, [text], truncated=truncated)
    assert parse(form, data.draw(cut(text)), truncated=truncated) == whole
    if not any(isinstance(event, ToolCall) for event in whole):
        assert "".join(map(str, whole)) == text


@given(data=st.data(), form=st.sampled_from([HERMES, LLAMA3, MISTRAL, FORCED]))
@example(data=None, form=HERMES)
def test_a_call_that_is_cut_off_is_never_complete_and_nothing_is_lost(
    data: st.DataObject | None, form: ToolFormat
) -> None:
    body = f"[{X}]" if form is MISTRAL else X
    text = f"{form.start}{body}{form.end}"
    places = range(len(text)) if data is None else [data.draw(st.integers(0, len(text) - 1))]
    for place in places:
        events = parse(form, list(text[:place]), truncated=True)
        if not events or isinstance(events[0], str):
            assert events == ([text[:place]] if place else [])
            continue
        begun, *rest = events
        assert not begun.complete
        assert text[:place].endswith(begun.arguments + "".join(map(str, rest)))
        with pytest.raises(json.JSONDecodeError):
            json.loads(begun.arguments)


def test_content_is_not_held_back_and_arguments_are_not_either() -> None:
    parser = ToolParser(HERMES)
    assert parser.push("Hello <") == [("Hello ", ())]
    assert not parser.pending
    assert parser.push("b>") == [("<b>", ())]
    assert parser.push("<tool_call>") == []
    assert parser.pending
    assert parser.push('{"name": "f", "arguments": ') == []
    assert parser.push("{") == [("", (("f", "", False),)), ("", (("", "{", False),))]
    for char in '"x"  :1.50':
        assert parser.push(char) == [("", (("", char, False),))]
    # The end shows that it is one, so it waits for all that must follow.
    assert parser.push("}}") == []
    assert parser.push("\n</tool_cal") == []
    assert parser.push("l>") == [("", (("", "}", True),))]
    assert not parser.pending


@given(ARGUMENTS, st.data())
def test_parts_add_up_to_what_was_written(arguments: Any, data: st.DataObject) -> None:
    space = data.draw(st.sampled_from(["", " ", "\n  "]))
    written = json.dumps(arguments, ensure_ascii=False, separators=(f",{space}", f"{space}:"))
    text = f'<tool_call>{{"name" :"f",{space}"arguments":{space}{written}{space}}}</tool_call>'
    assert parse(HERMES, data.draw(cut(text))) == [ToolCall("f", written)]


def test_a_long_call_is_read_once() -> None:
    long = json.dumps({"name": "f", "arguments": {"x": "y" * 20_000}})
    scanner = JsonEnd()
    for end in range(0, len(long), 100):
        assert scanner.find(long[:end], 0) is None
        assert scanner.scanned == end
    assert scanner.find(long, 0) == len(long)


@given(JSON.filter(lambda value: isinstance(value, dict | list)), st.text("{}[] x", max_size=4))
def test_the_end_of_a_value_is_where_json_says(value: Any, rest: str) -> None:
    text = json.dumps(value, ensure_ascii=False)
    end = json.JSONDecoder().raw_decode(text + rest)[1]
    assert JsonEnd().find(f"..{text}{rest}", 2) == end + 2


INFINITE = '{"name": "f", "arguments": {"x": 1e999}}'


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", "3", '{"name": 3}', '{"name": ""}', "{", INFINITE]
)
def test_what_is_no_call_is_none(text: str) -> None:
    assert read_calls(text) is None


def test_partial_tags() -> None:
    assert partial_tag("a<too", "<tool>") == 4
    assert partial_tag("<tool>", "<tool>") == 0
    assert partial_tag("", "<tool>") == 0
    assert partial_tag("aab", "aabaac") == 3
    assert partial_tag("xaa", "aab") == 2


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({}, None),
        ({"default": "{{ messages }}"}, None),
        ({"default": 'use <tool_call>{"name": ..}</tool_call>'}, HERMES),
        ({"default": "plain", "tool_use": "<tool_call>"}, HERMES),
        ({"default": "<tool_call><function=f>"}, None),
        ({"default": "{{ '[TOOL_CALLS] [' }}"}, MISTRAL),
        ({"default": "[TOOL_CALLS]f[ARGS]"}, None),
        ({"default": "<|python_tag|>"}, LLAMA3),
        ({"default": '<|start_header_id|> {"name": f, "parameters": x}'}, LLAMA3),
    ],
)
def test_the_template_says_how_calls_are_written(sources: dict[str, str], expected: Any) -> None:
    assert tool_format(sources) is expected


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


@pytest.mark.parametrize("name", [None, "walk"])
def test_a_forced_call_is_one_of_the_tools_with_arguments_that_fit(name: str | None) -> None:
    tree = {
        "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/node"}},
        "required": ["at"],
    }
    schema = forced_call_schema([tool("f"), tool("walk", tree)], name)
    check = jsonschema.Draft202012Validator(schema)
    check.check_schema(schema)
    assert check.is_valid({"name": "walk", "arguments": {"at": [[], [[]]]}})
    assert not check.is_valid({"name": "walk", "arguments": {"at": [[], [3]]}})
    assert not check.is_valid({"name": "walk", "arguments": {}})
    assert not check.is_valid({"name": "walk"})
    assert check.is_valid({"name": "f", "arguments": {"x": 1}}) == (name is None)
    assert not check.is_valid({"name": "g", "arguments": {}})


def test_a_forced_call_needs_its_tool() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        forced_call_schema([tool("f")], "g")
    assert caught.value.field == "tool_choice"
