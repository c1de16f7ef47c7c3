"""The aarch64 build: it compiles, and its kernels compute the same under an emulator."""

from __future__ import annotations

import subprocess

import pytest

from tests.native.standalone import COMMON, ROOT, need, passed

TOOLCHAIN = "aarch64-linux-gnu"


def emulated(*emulator: str) -> list[str]:
    """What the program that was built last finds in order on the emulator's processor."""
    program = ROOT / "build" / f"native-{TOOLCHAIN}" / "steppe_tests"
    done = subprocess.run([*emulator, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return [line.removesuffix(": ok") for line in done.stdout.splitlines() if ": ok" in line]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_kernels_of_aarch64_compute_the_same() -> None:
    need("cmake", "ninja", f"{TOOLCHAIN}-g++", "qemu-aarch64")
    assert passed("--cross", TOOLCHAIN) == [*COMMON, "neon_dotprod", "portable"]
    # A processor that lacks the instructions is not given them.
    older = emulated("qemu-aarch64", "-L", f"/usr/{TOOLCHAIN}", "-cpu", "cortex-a53")
    assert older == [*COMMON, "portable"]
