"""Engines over scripted runtimes; each is checked for leaks when its test is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from steppe.engine import EngineConfig, RequestEngine, ShutdownMode
from steppe.testing import Script, ScriptedRuntime, assert_idle_clean

if TYPE_CHECKING:
    from collections.abc import Iterator

MakeEngine = Callable[..., tuple[RequestEngine, ScriptedRuntime]]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """``make_engine(script fields, manual=..., config=dict(...)) -> (engine, runtime)``.

    Batch size is the script's capacity unless the config says otherwise. At the end every engine is
    shut down and must be clean.
    """
    made: list[RequestEngine] = []

    def make(
        *, manual: bool = True, config: dict[str, Any] | None = None, **script: Any
    ) -> tuple[RequestEngine, ScriptedRuntime]:
        runtime = ScriptedRuntime(Script(**script))
        settings = {"max_batch_size": runtime.script.capacity} | (config or {})
        if manual:
            engine = RequestEngine.from_factory(
                runtime.begin_stepped, EngineConfig(**settings), manual=True
            )
        else:
            engine = RequestEngine(runtime, EngineConfig(**settings))
        made.append(engine)
        return engine, runtime

    yield make
    for engine in made:
        engine.shutdown(ShutdownMode.CANCEL)
        assert_idle_clean(engine)
