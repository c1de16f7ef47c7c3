"""The extension, or a skip of the importing module where it has not been built."""

from __future__ import annotations

import pytest

from steppe.errors import BackendError

try:
    from steppe.backends.native import NativeBackend, _native
except BackendError as error:
    pytest.skip(f"{error}", allow_module_level=True)

__all__ = ["VARIANTS", "NativeBackend", "_native"]

VARIANTS = _native.variants()
"""Instruction sets that this machine runs: every one of them is tested."""
