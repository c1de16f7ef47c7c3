"""P02: only streams noticed that their client was gone. A cancel works at any stage of any
request.
"""

from __future__ import annotations

import pytest

from steppe.errors import RequestCancelledError
from tests.engine.helpers import ask, run, tick

from .engines import scripted


@pytest.mark.parametrize("stage", ["queued", "waiting", "prefill", "decode"])
@pytest.mark.parametrize("task", ["generate", "embed"])
def test_every_stage_ends_within_one_boundary(stage: str, task: str) -> None:
    with scripted(capacity=1, config={"max_step_tokens": 8}) as (engine, runtime):
        if stage == "waiting":
            engine.submit(ask(50))
        handle = engine.submit(ask(None, prompt=2 if stage == "decode" else 100, task=task))
        tick(engine, {"queued": 0, "waiting": 3, "prefill": 3, "decode": 1}[stage])
        if stage == "decode" and task == "embed":
            assert handle.get().token_ids == (), "an embedding does not decode"
            return
        computed = runtime.prompt_tokens.get(handle.id, 0)
        handle.cancel()
        tick(engine)
        assert handle.ready
        assert runtime.prompt_tokens.get(handle.id, 0) == computed
        with pytest.raises(RequestCancelledError):
            handle.get()
        for other in range(1, handle.id):
            engine.cancel(other)
        run(engine)
