"""Engines that replicas of tests run: scripted ones, with a thread, here or in a child process."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import Any

from steppe import EngineConfig, RequestEngine
from steppe.client import LocalClient, ModelCard
from steppe.errors import CheckpointError, ExecutionLostError
from steppe.testing import Script, ScriptedRuntime
from tests.runtime.fakes import byte_tokenizer

FACTORY = "tests.replicas.engines"


class SleepCost:
    """Every step takes that many seconds of real time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def charge_admission(self, prompt_tokens: int) -> None:
        """Nothing."""

    def charge_step(self, rows: Any, chunks: Any) -> None:
        """Sleep."""
        time.sleep(self.seconds)


def scripted(
    *,
    step_seconds: float = 0.0,
    max_pending: int = 64,
    lose_at: int | None = None,
) -> LocalClient:
    """A client over a scripted engine whose steps take that long; one of them may end it."""
    lost = {} if lose_at is None else {lose_at: ExecutionLostError("the device is gone")}
    cost = SleepCost(step_seconds) if step_seconds else None
    runtime = ScriptedRuntime(Script(capacity=8, cost=cost, fail_steps=lost))
    engine = RequestEngine(
        runtime,
        EngineConfig(
            max_batch_size=8,
            command_queue_capacity=64,
            max_pending_requests=max_pending,
        ),
    )
    tokenizer = byte_tokenizer()
    card = ModelCard(
        name="scripted",
        context_length=4096,
        vocab_size=tokenizer.vocab_size,
        max_batch_size=8,
        max_pending=max_pending,
        has_chat_template=False,
    )
    return LocalClient(engine, tokenizer=tokenizer, card=card)


def named_by(*, variable: str) -> LocalClient:
    """A scripted engine whose model has the name that a variable of its process has."""
    client = scripted()
    client._card = replace(client.card, name=os.environ.get(variable, "unset"))
    return client


def broken(**options: Any) -> LocalClient:
    """A model that cannot be loaded."""
    raise CheckpointError("the file is cut short")


def bugged(**options: Any) -> LocalClient:
    """A factory with a mistake in it."""
    raise ZeroDivisionError("a mistake")


def endless(**options: Any) -> LocalClient:
    """A model that is never loaded."""
    threading.Event().wait()
    raise AssertionError("nobody sets it")


def deadly(**options: Any) -> LocalClient:
    """A model that takes its process with it."""
    os._exit(3)
