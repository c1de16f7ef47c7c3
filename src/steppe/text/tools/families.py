"""How a model writes tool calls, and what an answer that must be one looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steppe.errors import InvalidRequestError
from steppe.text.tools.parser import ToolFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["FORCED", "forced_call_schema", "tool_format"]

HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
"""Hermes 2 Pro and after, Qwen 2.5 and 3: one object between tags for each call."""
LLAMA3 = ToolFormat("llama3", "<|python_tag|>", bare=True, between=";", special=True)
"""Llama 3.1 and after: the answer is the object, with or without the tag."""
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", bare=True, special=True)
"""Mistral's third tokenizer version and the seventh: an array after the tag."""
FORCED = ToolFormat("forced", "")
"""An answer under ``forced_call_schema``: the object, and nothing else."""


def tool_format(templates: Mapping[str, str]) -> ToolFormat | None:
    """The format of a model with these chat templates (``ChatTemplate.sources``); None if it is
    none that we know.
    """
    source = templates.get("tool_use", "") + templates.get("default", "")
    if HERMES.start in source:
        # Some write the call between these tags as XML, which is another format.
        return None if "<function=" in source else HERMES
    if MISTRAL.start in source:
        return None if "[ARGS]" in source else MISTRAL
    if LLAMA3.start in source or ("<|start_header_id|>" in source and '"parameters"' in source):
        return LLAMA3
    return None


def forced_call_schema(
    tools: Sequence[Mapping[str, Any]], name: str | None = None
) -> dict[str, Any]:
    """The JSON schema of one call: of the tool ``name``, or of any of them.

    ``tools`` are OpenAI's (``{"type": "function", "function": {...}}``). It serves any model, also
    one without a format of its own: the answer is read with ``FORCED``. Raises InvalidRequestError
    (``tool_choice``) when there is no such tool.
    """
    functions = [tool["function"] for tool in tools]
    chosen = [one for one in functions if name is None or one["name"] == name]
    if not chosen:
        raise InvalidRequestError("tool_choice", f"there is no tool {name!r}")
    if len(chosen) == 1:
        return _call_schema(chosen[0], "#")
    return {"anyOf": [_call_schema(one, f"#/anyOf/{i}") for i, one in enumerate(chosen)]}


def _call_schema(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    arguments = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": _moved(arguments, f"{place}/properties/arguments"),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema that now stands at ``place`` of another: its references to itself follow."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
