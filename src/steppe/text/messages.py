"""Checking a conversation before a template sees it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from steppe.errors import InvalidRequestError, UnsupportedRequestError

__all__ = ["JSONValue", "checked_messages", "plain_json"]

JSONValue = str | int | float | bool | None | list["JSONValue"] | dict[str, "JSONValue"]

_MAX_DEPTH = 64


def checked_messages(messages: object, field: str = "messages") -> list[dict[str, JSONValue]]:
    """A plain, private copy of a conversation.

    Each message has a ``role`` (a string) and a ``content``: a string, a list of
    ``{"type": "text", "text": ...}`` parts, or nothing beside ``tool_calls``. Keys whose value is
    None are dropped, since templates ask whether a key is there. Raises ``InvalidRequestError``
    naming the place (``messages[3].content``), ``UnsupportedRequestError`` for parts that are not
    text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError(field, "must be a list of messages")
    if not messages:
        raise InvalidRequestError(field, "is empty")
    return [_message(message, f"{field}[{i}]") for i, message in enumerate(messages)]


def plain_json(value: object, field: str, depth: int = 0) -> JSONValue:
    """``value`` rebuilt from plain JSON types, so that a template can touch nothing else."""
    if depth > _MAX_DEPTH:
        raise InvalidRequestError(field, f"is nested more than {_MAX_DEPTH} deep")
    match value:
        case None | bool():
            return value
        case str():
            return _text(value, field)
        case int():
            return int(value)
        case float():
            if not math.isfinite(value):
                raise InvalidRequestError(field, f"must be finite, not {value}")
            return float(value)
        case Mapping():
            plain: dict[str, JSONValue] = {}
            for key, item in value.items():
                if not isinstance(key, str):
                    raise InvalidRequestError(field, f"has a key that is no string: {key!r}")
                plain[_text(key, field)] = plain_json(item, f"{field}.{key}", depth + 1)
            return plain
        case list() | tuple():
            return [plain_json(v, f"{field}[{i}]", depth + 1) for i, v in enumerate(value)]
        case _:
            raise InvalidRequestError(field, f"holds a {type(value).__name__}, which is not JSON")


def _text(value: str, field: str) -> str:
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(field, f"is not valid Unicode: {error}") from error
    return text


def _message(message: object, field: str) -> dict[str, JSONValue]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(field, f"must be an object, not {type(message).__name__}")
    plain: dict[str, Any] = {}
    for key, value in message.items():
        if not isinstance(key, str):
            raise InvalidRequestError(field, f"has a key that is no string: {key!r}")
        if value is not None:
            plain[key] = plain_json(value, f"{field}.{key}", 1)
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{field}.role", "must be a non-empty string")
    calls = plain.get("tool_calls")
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    ):
        raise InvalidRequestError(f"{field}.tool_calls", "must be a list of objects")
    if "content" in plain:
        _check_content(plain["content"], f"{field}.content")
    elif not calls:
        raise InvalidRequestError(f"{field}.content", "is missing")
    return plain


def _check_content(content: JSONValue, field: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequestError(field, "must be a string or a list of parts")
    for index, part in enumerate(content):
        where = f"{field}[{index}]"
        if not isinstance(part, dict):
            raise InvalidRequestError(where, "must be an object")
        kind = part.get("type")
        if not isinstance(kind, str):
            raise InvalidRequestError(f"{where}.type", "must be a string")
        if kind != "text":
            raise UnsupportedRequestError(
                f"{where}.type", f"{kind!r} content is not supported by this model; only text is"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where}.text", "must be a string")
