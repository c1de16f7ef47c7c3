"""The standalone C++ test program: built by csrc/build.py, run, and read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.built import VARIANTS, _native

ROOT = Path(__file__).resolve().parents[2]

COMMON = ["pool", "packing"]
"""What the program tests once, before the variants of the kernels."""


EMULATED = [
    name
    for name in _native.built_variants()
    if name not in VARIANTS and name.startswith("avx") and "avx2" in VARIANTS
]
"""Variants that this machine cannot run, but run with their instructions written out in AVX2."""


def need(*tools: str) -> list[str]:
    """Where these tools are; where one is missing, skips the calling test and names it."""
    paths = []
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for tool in tools:
        path = shutil.which(tool, path=scripts)
        if path is None:
            pytest.skip(f"not run: there is no {tool} here")
        paths.append(path)
    return paths


def passed(*options: str) -> list[str]:
    """What the program found in order, as ``csrc/build.py`` with these options runs it."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "csrc" / "build.py"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "CLICOLOR": "0"},
    )
    assert done.returncode == 0, done.stdout[-8000:]
    lines = [line.split(": ", 1)[-1] for line in done.stdout.splitlines()]
    return [line.removesuffix(": ok") for line in lines if line.endswith(": ok")]
