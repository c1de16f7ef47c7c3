"""Which guides are plainly harmless, and which must be tried elsewhere first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steppe.request import Guided

__all__ = ["plainly_harmless"]

HARMLESS_BYTES = 4096
HARMLESS_COUNT = 10_000
"""Bound of ``maxLength`` and its kin."""

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$schema", "$comment"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_VALUES = frozenset({"const", "enum", "required", "type", "$ref", "minimum", "maximum"})
_SCHEMAS = frozenset({"items", "additionalProperties"})
_SCHEMA_LISTS = frozenset({"anyOf", "prefixItems"})
_SCHEMA_MAPS = frozenset({"properties", "$defs", "definitions"})


def plainly_harmless(guided: Guided) -> bool:
    """Whether a guide is short and made only of parts that compile in time linear in its length.

    Regular expressions, and the schema keywords that become intersections or automata of any size,
    are not such parts.
    """
    kind, text = guided.source
    if kind == "json_object":
        return True
    if len(text) > HARMLESS_BYTES:
        return False
    return kind == "choice" or (kind == "json_schema" and _harmless_schema(json.loads(text)))


def _harmless_schema(schema: object) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict):
        return False
    for key, value in schema.items():
        if key in _ANNOTATIONS or key in _VALUES:
            continue
        if key in _COUNTS:
            if not isinstance(value, int) or value > HARMLESS_COUNT:
                return False
        elif key in _SCHEMAS:
            if not _harmless_schema(value):
                return False
        elif key in _SCHEMA_LISTS:
            if not (isinstance(value, list) and all(map(_harmless_schema, value))):
                return False
        elif key in _SCHEMA_MAPS:
            if not (isinstance(value, dict) and all(map(_harmless_schema, value.values()))):
                return False
        else:
            return False
    return True
