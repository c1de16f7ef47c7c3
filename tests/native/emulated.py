"""``make emulated``: what the quick tests here say of variants for other processors than this one.

Their instructions are written out in AVX2 (``csrc/tests/emulated.h``). ``main`` builds an extension
with them and runs the tests with this module as a plugin, which puts that extension in the place of
the installed one. The standalone program has the same variants in ``test_sanitizers.py``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAME = "steppe.backends.native._native"
EXTENSION = "STEPPE_TEST_EXTENSION"


def put_in_place(path: str) -> None:
    """Make the file at ``path`` the extension of this process."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = extension
    spec.loader.exec_module(extension)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was tested, as the tests see it."""
    from tests.native.built import VARIANTS

    terminalreporter.write_line(f"variants: {' '.join(VARIANTS)}")


def main() -> int:
    """Build, test, and return the status of what failed."""
    from tests.native.standalone import EMULATED

    if not EMULATED:
        print("not run: this machine runs all variants there are, or lacks AVX2")
        return 0
    names = ",".join(EMULATED)
    build = [sys.executable, str(ROOT / "csrc" / "build.py"), "--emulate", names]
    built = subprocess.run([*build, "--variants", names], check=False)
    if built.returncode:
        return built.returncode
    [extension] = (ROOT / "build" / "native-emulated").glob("_native.*.so")
    # Left out is what is about the whole of a build.
    only = ["-m", "not slow", str(HERE), "--ignore", str(HERE / "test_variants.py")]
    tests = [sys.executable, "-m", "pytest", "-p", "tests.native.emulated", "-o", "timeout=600"]
    return subprocess.run(
        [*tests, *only], check=False, cwd=ROOT, env={**os.environ, EXTENSION: str(extension)}
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
elif EXTENSION in os.environ:
    put_in_place(os.environ[EXTENSION])
