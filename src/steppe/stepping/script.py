"""What a simulated run is told: a clock, costs, and a script of everything that may happen."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from steppe.errors import ExecutionError
from steppe.stepping.types import ScheduledSequenceDescriptor, SequenceIdentity, SlotSeed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from steppe.request import LLMGenerationRequest, TokenLogprob
    from steppe.stepping.types import AdmissionResult, ResidentRef, SequenceWork
    from steppe.streaming import StreamChannel

__all__ = [
    "FakeClock",
    "Hold",
    "LinearCost",
    "Script",
    "ScriptedResident",
    "StepCost",
    "one_token",
    "prompt_ids",
    "scripted_token",
    "seed_of",
    "text_of",
]


class FakeClock:
    """A clock that stands still until it is told to advance. Any thread."""

    def __init__(self, start: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._now = start

    def __call__(self) -> float:
        """The time, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let that much time pass, at once."""
        with self._lock:
            self._now += seconds


class Hold:
    """Keeps one step open: the step waits until ``release``. Any thread."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        """Set when the step has begun."""
        self._released = threading.Event()

    def release(self) -> None:
        """Let the step go on."""
        self._released.set()

    def pass_through(self) -> None:
        """The step's side."""
        self.entered.set()
        self._released.wait()


class StepCost(Protocol):
    """What a scripted run costs, on whatever clock. Both are called before anything is done."""

    def charge_admission(self, prompt_tokens: int) -> None:
        """A sequence is being seated."""

    def charge_step(
        self,
        rows: Sequence[tuple[ScriptedResident, int]],
        chunks: Sequence[tuple[ScriptedResident, int]],
    ) -> None:
        """A step decodes these residents and computes these chunks of prompts; the numbers are
        tokens.
        """


@dataclass(frozen=True, slots=True)
class LinearCost:
    """What a step costs on a clock: seconds for itself, per decoding row, per prompt token."""

    clock: FakeClock
    per_step: float = 0.0
    per_decode: float = 0.0
    per_prompt_token: float = 0.0

    def charge_admission(self, prompt_tokens: int) -> None:
        """Nothing."""

    def charge_step(
        self,
        rows: Sequence[tuple[ScriptedResident, int]],
        chunks: Sequence[tuple[ScriptedResident, int]],
    ) -> None:
        """Advance the clock by what such a step takes."""
        prompt_tokens = sum(tokens for _, tokens in chunks)
        self.clock.advance(
            self.per_step + self.per_decode * len(rows) + self.per_prompt_token * prompt_tokens
        )


def scripted_token(request_id: int, position: int) -> int:
    """The default script: a token id under 32,000, a pure function of request and position."""
    mixed = (request_id * 0x9E3779B1 + position * 0x85EBCA77 + 0x27D4EB2F) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)) % 32000


def one_token(request_id: int, turn: int) -> int:
    """The default burst."""
    return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What happens in a scripted run. Steps are counted from 1, across batches.

    ``mixed`` chooses between ``step`` and the seed's seven methods. ``tokens(request_id,
    position)`` is the token at an output position, ``burst(request_id, turn)`` how many tokens its
    turn-th step yields (0, 1 or several; turn 0 is the prefill, which yields one at most),
    ``length(request_id)`` after how many an EOS comes (None: at ``max_tokens``, or the context).
    ``pages`` None is a pool without end; ``overcommit`` reserves prompts only.

    ``refuse(request_id, attempt)`` may answer an admission, ``found(request_id)`` False refuses a
    founder; both may raise. ``fail_steps`` raises at a step, ``bad_steps`` are reported as not ok,
    ``fail_requests`` ends one request at an output position with an error of its own. ``holds``
    keeps steps open. ``cost`` lets them take time.
    """

    mixed: bool = True
    capacity: int = 8
    context: int = 4096
    page_size: int = 16
    pages: int | None = None
    overcommit: bool = False
    tokens: Callable[[int, int], int] = scripted_token
    burst: Callable[[int, int], int] = one_token
    length: Callable[[int], int | None] = field(default=lambda _: None)
    refuse: Callable[[int, int], AdmissionResult | None] = field(default=lambda _, __: None)
    found: Callable[[int], bool] = field(default=lambda _: True)
    fail_steps: Mapping[int, BaseException] = field(default_factory=dict)
    bad_steps: frozenset[int] = frozenset()
    fail_requests: Mapping[int, int] = field(default_factory=dict)
    holds: Mapping[int, Hold] = field(default_factory=dict)
    cost: StepCost | None = None
    batch_fields: frozenset[str] = frozenset()


@dataclass(slots=True)
class ScriptedResident:
    """One seated sequence of a scripted batch. Counts are in tokens, and in pages."""

    seed: SlotSeed
    ref: ResidentRef
    request: LLMGenerationRequest
    generated: list[int]
    to_prefill: int
    computed: int
    pages: int
    limit: int
    channel: StreamChannel | None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def descriptor(self, work: SequenceWork, tokens: int) -> ScheduledSequenceDescriptor:
        """Its part in a step."""
        identity = SequenceIdentity(self.seed.request_id, self.ref)
        return ScheduledSequenceDescriptor(identity, work, tokens, self.computed)


def prompt_ids(request: LLMGenerationRequest) -> tuple[int, ...]:
    """The prompt as the script sees it: its ids, or the code points of its text."""
    prompt = request.prompt
    if prompt is None:
        prompt = "".join(str(message) for message in request.messages or ())
    if isinstance(prompt, str):
        return tuple(map(ord, prompt)) or (0,)
    return tuple(prompt)


def seed_of(
    request: LLMGenerationRequest, original_index: int, request_id: int, script: Script
) -> SlotSeed:
    """The seed of a scripted sequence. Raises ExecutionError for a prompt beyond the context."""
    ids, params = prompt_ids(request), request.params
    room = script.context - len(ids)
    if room < 0:
        raise ExecutionError(f"{len(ids)} prompt tokens in a context of {script.context}")
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    return SlotSeed(
        request_id=request_id,
        original_index=original_index,
        prompt_token_ids=ids,
        params=params,
        seed=params.seed or 0,
        max_tokens=limit,
        sequence_index=request.sequence_index,
        stream_channel=request.stream_channel,
    )


def text_of(ids: Sequence[int]) -> str:
    """What scripted tokens read like."""
    return "".join([f"<{token}>" for token in ids])
