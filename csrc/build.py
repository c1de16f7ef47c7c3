"""Build the native backend in place, for development: ``python csrc/build.py``.

Puts ``_native`` beside ``steppe/backends/native/__init__.py``. Needs a C++20 compiler, cmake,
ninja and the nanobind package. ``--tests`` builds the standalone test program as well and runs it.
``--sanitize address,undefined`` (or ``thread``) and ``--cross aarch64-linux-gnu`` build and run
only that program, in a folder of its own; a cross-compiled one runs in the emulator that the
toolchain file of that name sets. ``--emulate avx512,avx512_vnni`` builds variants that this
machine cannot run, their instructions written out in AVX2, and leaves the extension in such a
folder (or is one of those programs, with ``--sanitize``). ``--variants avx2`` builds only some of
them (and ``portable``, always). Exits with the status of what failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
ROOT = SOURCE.parent
TARGET = ROOT / "src" / "steppe" / "backends" / "native"

# A report ends the program, and its status says so.
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--sanitize", default="")
    parser.add_argument("--cross", default="", metavar="TOOLCHAIN")
    parser.add_argument("--variants", default="", help="all, unless named")
    parser.add_argument("--emulate", default="", metavar="VARIANTS")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    alone = bool(args.sanitize or args.cross)
    parts = ["native", *args.sanitize.split(","), args.cross, "emulated" if args.emulate else ""]
    build = ROOT / "build" / "-".join(part for part in parts if part)
    options = {
        "STEPPE_MODULE": "OFF" if alone else "ON",
        "STEPPE_TESTS": "ON" if args.tests or alone else "OFF",
        "STEPPE_SANITIZE": args.sanitize,
        "STEPPE_VARIANTS": args.variants.replace(",", ";"),
        "STEPPE_EMULATE": args.emulate.replace(",", ";"),
        "Python_EXECUTABLE": sys.executable,
    }
    if args.cross:
        options["CMAKE_TOOLCHAIN_FILE"] = str(SOURCE / f"{args.cross}.cmake")
    configure = ["cmake", "-S", str(SOURCE), "-B", str(build), "-G", "Ninja"]
    run([*configure, *(f"-D{key}={value}" for key, value in options.items())])
    run(["cmake", "--build", str(build), "-j", str(args.jobs)])
    if not alone and not args.emulate:
        for module in build.glob("_native*.so"):
            # Replaced, not written over: a running process has the old file mapped.
            fresh = TARGET / (module.name + ".new")
            shutil.copy2(module, fresh)
            fresh.replace(TARGET / module.name)
    if options["STEPPE_TESTS"] == "ON":
        run(["ctest", "--test-dir", str(build), "--verbose"], SANITIZER_OPTIONS)


def run(command: list[str], environment: dict[str, str] | None = None) -> None:
    # The tools of this interpreter's environment come before the system's.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": path, **(environment or {})}
    done = subprocess.run(command, check=False, env=environment)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
