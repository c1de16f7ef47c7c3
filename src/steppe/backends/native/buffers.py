"""Which buffer holds which value of a tape, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.errors import BackendError

if TYPE_CHECKING:
    from steppe.backends.native import _native

__all__ = ["Buffers"]

_Key = tuple[str, int, int, int]


class Buffers:
    """Float slots and activation panels of a program, by value.

    A value may have a slot and a panel of each form. ``release`` gives all of a
    value's buffers to later values of the same shape.
    """

    def __init__(self, program: _native.Program) -> None:
        self._program = program
        self._free: dict[_Key, list[int]] = {}
        self._held: dict[int, dict[_Key, int]] = {}

    def slot(self, value: int, width: int, domain: int) -> int:
        """The float slot of a value, a new one if it has none."""
        return self._take(value, ("slot", width, domain, 0))

    def panel(self, value: int, form: int, width: int, domain: int) -> int:
        """A panel of ``form`` for a value."""
        return self._take(value, ("panel", width, domain, form))

    def slot_of(self, value: int) -> int:
        """The float slot that holds a value."""
        return self._find(value, "slot", 0)

    def panel_of(self, value: int, form: int) -> int:
        """The panel that holds a value in ``form``."""
        return self._find(value, "panel", form)

    def has_slot(self, value: int) -> bool:
        """Whether a value has been computed into a float slot, and is still there."""
        return any(key[0] == "slot" for key in self._held.get(value, ()))

    def rename(self, value: int, successor: int) -> None:
        """The float slot of a value becomes its successor's, which is computed in place."""
        held = self._held[value]
        for key in [key for key in held if key[0] == "slot"]:
            self._held.setdefault(successor, {})[key] = held.pop(key)

    def release(self, value: int) -> None:
        """Nobody reads the value any more."""
        for key, number in self._held.pop(value, {}).items():
            self._free.setdefault(key, []).append(number)

    def _take(self, value: int, key: _Key) -> int:
        held = self._held.setdefault(value, {})
        if key not in held:
            free = self._free.get(key)
            held[key] = free.pop() if free else self._make(key)
        return held[key]

    def _make(self, key: _Key) -> int:
        kind, width, domain, form = key
        if kind == "slot":
            return self._program.add_slot(width, domain)
        return self._program.add_panel(form, width, domain)

    def _find(self, value: int, kind: str, form: int) -> int:
        for key, number in self._held.get(value, {}).items():
            if key[0] == kind and key[3] == form:
                return number
        raise BackendError(f"value {value} of the tape is used before it is computed")
