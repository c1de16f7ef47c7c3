"""Conversations are checked before a template sees them, and every complaint names its place."""

from __future__ import annotations

from collections import UserDict
from enum import StrEnum
from typing import Any

import pytest

from steppe.errors import InvalidRequestError, UnsupportedRequestError
from steppe.text.messages import checked_messages, plain_json

OK: dict[str, Any] = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        ({"role": "user"}, "messages"),
        ([OK, "hi"], "messages[1]"),
        ([OK, {1: "x", **OK}], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([OK, OK, OK, {"role": "user"}], "messages[3].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "tool_calls": "f"}], "messages[0].tool_calls"),
        ([{"role": "user", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{**OK, "extra": {"a": [object()]}}], "messages[0].extra.a[0]"),
        ([{**OK, "extra": float("nan")}], "messages[0].extra"),
        ([{**OK, "extra": {2: 3}}], "messages[0].extra"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{**OK, "extra": {"\ud800": 3}}], "messages[0].extra"),
    ],
)
def test_complaints_name_the_place(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checked_messages(messages)
    assert caught.value.field == field


def test_parts_that_are_not_text_are_unsupported() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    text = {"type": "text", "text": "x"}
    with pytest.raises(UnsupportedRequestError, match="image_url") as caught:
        checked_messages([{"role": "user", "content": [text, image]}])
    assert caught.value.field == "messages[0].content[1].type"


def test_depth_is_bounded() -> None:
    deep: Any = "x"
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="nested"):
        checked_messages([{**OK, "extra": deep}])


def test_the_copy_is_plain_private_and_without_nones() -> None:
    class Role(StrEnum):
        USER = "user"

    parts = [{"type": "text", "text": "x"}]
    given = UserDict(role=Role.USER, content=parts, name=None, more=(1, 2.5, True, None))
    (copy,) = checked_messages((given,))
    assert copy == {"role": "user", "content": parts, "more": [1, 2.5, True, None]}
    assert type(copy["role"]) is str
    parts[0]["text"] = "changed"
    assert copy["content"] == [{"type": "text", "text": "x"}]


def test_tool_calls_stand_for_content() -> None:
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    (copy,) = checked_messages([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert copy == {"role": "assistant", "tool_calls": calls}


def test_plain_json_names_a_value() -> None:
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]\.x: holds a set"):
        plain_json([{"x": {1}}], "tools")
