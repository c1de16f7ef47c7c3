"""What an engine is told when it is made, and what it says of its own state."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

from steppe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EngineConfig", "EngineHealth", "HealthState", "ShutdownMode"]

HealthState = Literal["loading", "running", "stalled", "stopping", "stopped", "failed"]


class ShutdownMode(Enum):
    """DRAIN serves everything that was accepted; CANCEL ends it at the next step boundary."""

    DRAIN = "drain"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine admits and schedules (seed 000; the lower half goes beyond it).

    ``command_queue_capacity`` is rounded up to a power of two. ``max_pending_requests`` bounds
    what is accepted and not yet terminal (``n`` sequences count n), and ``max_pending_tokens`` the
    prompt tokens (of each sequence) of those that have no token yet; a prompt that none of them
    waits beside is accepted whatever its length. ``max_batch_size`` is how many sequences run at
    once. ``idle_wait`` (seconds) is the backstop of an idle actor, not its alarm.

    ``max_step_tokens`` bounds a step: decodes always run, prompt chunks share what they leave (and
    get at least one token); None sizes it from measured step times, for steps of about 50 ms, and
    gives prompts at least as many tokens as decodes.
    ``scheduling`` "fcfs" never lets a request overtake; "fair" orders by priority with ageing, then
    by tokens served to each ``caller``, and passes a head that does not fit at most
    ``max_head_skips`` times. ``overcommit`` reserves memory for prompts only. A step that takes
    longer than ``hang_limit`` seconds fails the engine. ``clock`` gives seconds and is the only one
    the engine reads.

    Raises ConfigError naming the field.
    """

    command_queue_capacity: int = 64
    max_pending_requests: int = 256
    max_pending_tokens: int | None = None
    max_batch_size: int = 1
    idle_wait: float = 0.05
    max_step_tokens: int | None = None
    scheduling: Literal["fcfs", "fair"] = "fcfs"
    max_head_skips: int = 8
    overcommit: bool = False
    hang_limit: float | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        for name, least in (
            ("command_queue_capacity", 1),
            ("max_pending_requests", 1),
            ("max_batch_size", 1),
            ("max_head_skips", 0),
        ):
            _check_count(name, getattr(self, name), least)
        for name in ("max_pending_tokens", "max_step_tokens"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 1)
        # Zero or less would make an idle actor spin.
        _check_seconds("idle_wait", self.idle_wait)
        if self.hang_limit is not None:
            _check_seconds("hang_limit", self.hang_limit)
        if self.scheduling not in ("fcfs", "fair"):
            raise ConfigError("scheduling", f"must be 'fcfs' or 'fair', not {self.scheduling!r}")
        if not isinstance(self.overcommit, bool):
            raise ConfigError("overcommit", f"must be true or false, not {self.overcommit!r}")


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(name, f"must be an integer of at least {least}, not {value!r}")


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(name, f"must be a number of seconds, not {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(name, f"must be more than 0 seconds, not {value!r}")


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether tokens are flowing. ``ok`` is readiness: accepting, and no step overdue.

    ``state`` is running, stalled (a step has run longer than ``hang_limit``), stopping, stopped or
    failed; loading only where an engine is started, or started again, behind a client.
    ``busy_for`` is how long the runtime call in flight has taken, in seconds of the engine's clock;
    None between calls. ``cause`` says what failed.
    """

    ok: bool
    state: HealthState
    queued: int
    resident: int
    busy_for: float | None = None
    cause: str | None = None
