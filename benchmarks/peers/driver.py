"""A system under measurement: a driver in a process of its own, spoken to by lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

PEERS = Path(__file__).resolve().parent


def as_installed() -> dict[str, str]:
    """The environment of a process under measurement: it may keep its bytecode, as pip keeps that
    of what it installs. Otherwise every start compiles anew.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Driver:
    """Starts a driver and runs cases on it (see ``workloads``). Times are seconds.

    ``first_token`` is from the start of the process to one token of a short prompt.
    """

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        started = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=as_installed(),
        )  # fmt: skip
        assert self._answer()["ready"]
        self.run(case="one", prompt=16, output=1, seed=899)
        self.first_token = time.perf_counter() - started

    def run(self, **job: Any) -> dict[str, float]:
        """One case; its times."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def peak_memory(self) -> int:
        """The most bytes that its processes held, added up (Linux)."""
        return peak_memory(self._process.pid)

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def peak_memory(root: int) -> int:
    """The most bytes that a process and all that descend from it held, added up (Linux)."""
    return sum(_peak(process) for process in _tree(root))


def _tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue  # it ended while we looked
            # The name, in brackets, may hold anything.
            parent = int(status.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def _peak(process: int) -> int:
    try:
        lines = Path("/proc", str(process), "status").read_text().splitlines()
    except OSError:
        return 0
    sizes = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(sizes[0]) * 1024 if sizes else 0
