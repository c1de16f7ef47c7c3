"""What an ``EngineCoreActor`` is told: its settings, and its two messages (seed 003)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.errors import ConfigError

if TYPE_CHECKING:
    import asyncio

    from steppe.replicas.output import OutputChannel
    from steppe.replicas.vocabulary import ExecuteBatch

__all__ = ["AddRequest", "GetLoad", "LocalEngineConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngineConfig:
    """How a replica bounds and supervises its runner (seed 003; the lower half goes beyond it).

    ``max_concurrent`` bounds the sequences that are accepted and not yet terminal,
    ``queue_capacity`` the messages in the mailbox. A lost runner is started again at most
    ``max_restarts`` times in ``restart_window`` seconds, after a pause of ``restart_pause`` that
    doubles each time; one that takes longer than ``max_loading`` to start is ended, and that is a
    loss. It is asked for its status every ``probe_interval`` seconds; one that has not
    answered for ``max_silence`` is lost. Times are the event loop's.

    Raises ConfigError naming the field.
    """

    max_concurrent: int = 32
    queue_capacity: int = 1024
    max_restarts: int = 3
    restart_window: float = 60.0
    restart_pause: float = 0.5
    probe_interval: float = 1.0
    max_silence: float = 30.0
    max_loading: float = 600.0

    def __post_init__(self) -> None:
        for name, least in (("max_concurrent", 1), ("queue_capacity", 1), ("max_restarts", 0)):
            count: object = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ConfigError(name, f"must be an integer of at least {least}, not {count!r}")
        for name in (
            "restart_window", "restart_pause", "probe_interval", "max_silence", "max_loading",
        ):  # fmt: skip
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(name, f"must be a number of seconds, not {value!r}")
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(name, f"must be more than 0 seconds, not {value!r}")


@dataclass(frozen=True, slots=True, eq=False)
class AddRequest:
    """Run ``batch`` and write its chunks to ``output``.

    ``admission`` is answered at once: None once a place is taken, or a SubmitError, and then
    nothing was begun and ``output`` is not touched. Whatever happens after that is told by
    ``output``: that the runner has accepted, its chunks, its one end.
    """

    batch: ExecuteBatch
    output: OutputChannel
    admission: asyncio.Future[None]


@dataclass(frozen=True, slots=True, eq=False)
class GetLoad:
    """Answer ``reply`` with the places taken over ``max_concurrent``.

    A SubmitError (``unavailable``) instead while the replica is not ready, or its runner has not
    answered for three probes.
    """

    reply: asyncio.Future[float]
