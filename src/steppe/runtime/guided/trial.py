"""A program of its own: compile one grammar, begin an answer in it, and say how that went.

A guide comes from a stranger, and the grammar library, which is fast and careful with most of them,
can be made to work for minutes or to overrun its stack. Neither can be stopped inside a process. So
``compiler`` first tries what is not plainly harmless here, in a process that is killed when its
time is up; see ``tried``. The program needs the library and nothing of this package.

It reads the grammar, in the library's form, from standard input, is given the folder that the
library is in and its seconds of processor time as arguments, and writes what was wrong to standard
output, nothing if nothing was. Processor time is what counts where the system can count it, so that
a grammar is not refused because the machine was busy.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import suppress

__all__ = ["tried"]

PATIENCE = 3
"""Seconds to wait for each second of processor time."""

WALK = 16
"""Tokens of an answer to try."""
STACK_BYTES = 4 << 20
"""Stack that a grammar may use: half of what a thread has on the systems that give least."""
MEMORY_BYTES = 4 << 30


def tried(source: str, library: str, seconds: int) -> str:
    """What is wrong with a grammar, found out in another process; empty if nothing is.

    The process may take that many seconds. Any thread. Raises OSError when it cannot be started.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        return "it would have to be tried by a Python interpreter, and there is none"
    too_long = f"it is not compiled within {seconds} s"
    command = [sys.executable, "-I", "-S", __file__, library, str(seconds)]
    try:
        done = subprocess.run(
            command,
            input=source.encode(),
            capture_output=True,
            timeout=seconds * PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return too_long
    if done.returncode == -getattr(signal, "SIGXCPU", 0) != 0:
        return too_long
    if done.returncode:
        return "it is too complex to compile"
    return done.stdout.decode(errors="replace")


class _Bytes:
    """A vocabulary of the 256 bytes and an end."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def _attempt(source: str, verdict: list[str]) -> None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(LLTokenizer(_Bytes()), source, log_level=0, limits=limits)  # type: ignore[arg-type]
    # Some grammars are only found to be too large when an answer gets to where they are.
    for _ in range(WALK):
        bits = int.from_bytes(matcher.compute_bitmask(), "little") if not matcher.is_error() else 0
        bits &= (1 << 256) - 1
        if not bits:
            break
        matcher.consume_token((bits & -bits).bit_length() - 1)
    # Special tokens are the real vocabulary's; here their names are unknown and that is no fault.
    error = matcher.get_error()
    verdict.append("" if "special token" in error else error)


def _limit(seconds: int) -> None:
    try:
        import resource
    except ImportError:  # not on this system: the time to wait is the limit
        return
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, seconds),
    ):
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        # Some systems have a limit and do not let it be set.
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, hard))


def _main() -> int:
    _limit(int(sys.argv[2]))
    sys.path.insert(0, sys.argv[1])
    verdict: list[str] = []
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_attempt, args=(sys.stdin.read(), verdict))
    worker.start()
    worker.join()
    if not verdict:
        return 1
    sys.stdout.write(verdict[0])
    return 0


if __name__ == "__main__":
    sys.exit(_main())
