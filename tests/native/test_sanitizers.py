"""Kernels of every variant, the pool, packing, sampling and whole steps under the sanitizers.

Variants that this machine cannot run are built with their instructions written out in AVX2
(``csrc/tests/emulated.h``): all of them are tested wherever there is AVX2.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.native.built import VARIANTS, _native
from tests.native.standalone import COMMON, EMULATED, need, passed

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
def test_every_variant_touches_only_what_is_its_own(tmp_path: Path) -> None:
    names = "address,undefined"
    need_sanitizer(names, tmp_path)
    tested = [name for name in _native.built_variants() if name in {*VARIANTS, *EMULATED}]
    options = ["--variants", ",".join(tested), "--emulate", ",".join(EMULATED)]
    assert passed("--sanitize", names, *options) == [*COMMON, *tested]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_threads_do_not_race(tmp_path: Path) -> None:
    need_sanitizer("thread", tmp_path)
    options = ["--sanitize", "thread", "--variants", ",".join(VARIANTS)]
    assert passed(*options) == [*COMMON, *VARIANTS]
