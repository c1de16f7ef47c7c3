"""P16: an embedded engine must not own its process."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from pathlib import Path

import pytest

from steppe.engine import EngineConfig, RequestEngine, ShutdownMode
from steppe.testing import Script, ScriptedRuntime
from tests.engine.helpers import ask


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


def test_twenty_engines_leave_no_thread_file_or_handler() -> None:
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    threads, files = set(threading.enumerate()), open_files()
    for number in range(20):
        runtime = ScriptedRuntime(Script(context=1 << 40))
        engine = RequestEngine(runtime, EngineConfig(hang_limit=100.0))
        handle = engine.submit(ask(1 << 39 if number % 2 else 3, timeout=1e6))
        if number % 4 < 2:
            engine.shutdown(ShutdownMode.CANCEL if number % 2 else ShutdownMode.DRAIN)
            engine.shutdown()
        gone = weakref.ref(engine)
        del engine
        assert gone() is None
        assert handle.ready
        assert runtime.closed
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)  # a dropped engine waits for its actor, and not for its clock
    assert set(threading.enumerate()) <= threads
    assert open_files() <= files
    assert {one: signal.getsignal(one) for one in handlers} == handlers


def test_an_exception_inside_with_ends_everything() -> None:
    runtime = ScriptedRuntime(Script(context=1 << 40))
    handles = []

    def use() -> None:
        with RequestEngine(runtime) as engine:
            handles.append(engine.submit(ask(1 << 39)))
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert handles[0].ready
    assert runtime.leaks() == []
