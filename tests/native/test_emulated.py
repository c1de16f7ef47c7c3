"""Variants for other processors than this machine's: what the quick tests here say of them.

Their instructions are written out in AVX2 (``csrc/tests/emulated.h``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.standalone import COMMON, EMULATED, ROOT, need, passed

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not EMULATED, reason="not run: this machine runs all there are, or lacks AVX2")
def test_every_variant_computes_the_same() -> None:
    need("cmake", "ninja", os.environ.get("CXX", "c++"))
    names = ",".join(EMULATED)
    assert passed("--variants", names, "--emulate", names) == [*COMMON, *EMULATED, "portable"]
    [extension] = (ROOT / "build" / "native-emulated").glob("_native.*.so")
    # Left out is what is about the whole of a build.
    only = ["-m", "not slow", str(HERE), "--ignore", str(HERE / "test_variants.py")]
    pytest_run = ["-m", "pytest", "-p", "tests.native.emulated", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, *pytest_run, "-q", "-x", "-o", "timeout=600", *only],
        env={**os.environ, "STEPPE_TEST_EXTENSION": str(extension)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"variants: {' '.join([*EMULATED, 'portable'])}" in done.stdout.splitlines()
