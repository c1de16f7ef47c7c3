"""A plugin, ``pytest -p tests.native.emulated``: the extension is the one that the environment
variable STEPPE_TEST_EXTENSION names, and no other.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

NAME = "steppe.backends.native._native"

spec = importlib.util.spec_from_file_location(NAME, os.environ["STEPPE_TEST_EXTENSION"])
assert spec is not None
assert spec.loader is not None
extension = importlib.util.module_from_spec(spec)
sys.modules[NAME] = extension
spec.loader.exec_module(extension)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was tested, as the tests see it."""
    from tests.native.built import VARIANTS

    terminalreporter.write_line(f"variants: {' '.join(VARIANTS)}")
