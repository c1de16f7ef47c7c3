"""Typed reading of configuration fields: a wrong one is an error that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from steppe.errors import CheckpointError

__all__ = ["LARGEST", "Fields"]

LARGEST: Final = 2**31 - 1
"""No count in a configuration may exceed this: positions and token ids are int32."""


class Fields:
    """A view of ``config.json``, of a part of it, or of GGUF metadata.

    A field that is absent or null takes its default; without one it is an error. Every error is a
    `CheckpointError` that starts with ``prefix`` and the field's name.
    """

    __slots__ = ("_prefix", "_values")

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def name(self, key: str) -> str:
        """The field's full name."""
        return self._prefix + key

    def get(self, key: str) -> Any:
        """The raw value; None when absent."""
        return self._values.get(self.name(key))

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = LARGEST
    ) -> int:
        """A whole number from ``minimum`` to ``maximum``."""
        value = self._present(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, "is no whole number", value)
        if not minimum <= value <= maximum:
            raise self.error(key, f"is not between {minimum} and {maximum}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number."""
        value = self._present(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, "is no number", value)
        # A JSON integer can be too long for a float; the comparison is exact.
        if not 0 < value <= 1e30 or not math.isfinite(value):
            raise self.error(key, "is not a finite positive number", value)
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "is neither true nor false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.error(key, "is no string", value)
        return value

    def part(self, key: str) -> Mapping[str, Any]:
        """A JSON object; empty when absent."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(key, "is no object", value)
        return value

    def optional_integer(self, key: str, absent: int | None = None) -> int | None:
        """A positive whole number; None when null, ``absent`` when absent."""
        if self.get(key) is None:
            return None if self.name(key) in self._values else absent
        return self.integer(key)

    def optional_number(self, key: str, absent: float | None = None) -> float | None:
        """A finite positive number; None when null, ``absent`` when absent."""
        if self.get(key) is None:
            return None if self.name(key) in self._values else absent
        return self.number(key)

    def error(self, key: str, problem: str, value: object) -> CheckpointError:
        """What to raise for a value that cannot be."""
        return CheckpointError(f"{self.name(key)} {problem}: {repr(value)[:80]}")

    def _present(self, key: str, default: object) -> object:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.name(key)} is missing")
        return value
