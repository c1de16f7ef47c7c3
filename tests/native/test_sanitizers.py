"""Kernels of every variant, the pool, packing, sampling and whole steps under the sanitizers."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.native.built import VARIANTS
from tests.native.standalone import COMMON, need, passed

if TYPE_CHECKING:
    from pathlib import Path

COMPILER = os.environ.get("CXX", "c++")


def need_sanitizer(names: str, folder: Path) -> None:
    """Skip where the compiler, or the kernel that runs its output, lacks these sanitizers."""
    need("cmake", "ninja", COMPILER)
    source, program = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() { return 0; }\n")
    for command in ([COMPILER, f"-fsanitize={names}", source, "-o", program], [program]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"not run: no {names} sanitizer here: {done.stderr.strip()[-300:]}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", ["address,undefined", "thread"])
def test_every_variant_is_clean(names: str, tmp_path: Path) -> None:
    need_sanitizer(names, tmp_path)
    assert passed("--sanitize", names) == [*COMMON, *VARIANTS]
