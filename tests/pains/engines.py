"""Scripted engines for pain tests of the control plane."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from steppe.engine import EngineConfig, RequestEngine, ShutdownMode
from steppe.testing import Script, ScriptedRuntime, assert_idle_clean

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def scripted(
    *, manual: bool = True, config: dict[str, Any] | None = None, **script: Any
) -> Iterator[tuple[RequestEngine, ScriptedRuntime]]:
    """An engine and its runtime; at the end it is shut down and must hold nothing."""
    runtime = ScriptedRuntime(Script(**script))
    settings = EngineConfig(**{"max_batch_size": runtime.script.capacity} | (config or {}))
    if manual:
        engine = RequestEngine.from_factory(runtime.begin_stepped, settings, manual=True)
    else:
        engine = RequestEngine(runtime, settings)
    try:
        yield engine, runtime
    finally:
        engine.shutdown(ShutdownMode.CANCEL)
    assert_idle_clean(engine)
