"""A run as JSON lines: what the planner saw, what it chose, what came of it (promise 7).

The first line is a header with the schema's version; each line after it is one event: an admission
(``admit``) or a step (``step``). A resident is ``[slot, epoch]``; times are the engine clock's.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from steppe.engine.planner import PlannerSnapshot, plan
from steppe.errors import ConfigError
from steppe.request import FinishReason
from steppe.stepping.types import (
    DecodeEntry,
    ImmutableDecodeBatch,
    ImmutablePrefillBatch,
    ImmutableStepBatch,
    PrefillEntry,
    ResidentNeed,
    ResidentRef,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

    from steppe.engine.record import SequenceRecord
    from steppe.stepping.types import StepResult

__all__ = ["SCHEMA", "Divergence", "Recorder", "Replay", "read_recording", "replay"]

SCHEMA = 1


class Recorder:
    """Writes events to a file until closed. The actor writes; any thread may close.

    A context manager. Nothing is written after ``close``, and a file system that fails in the
    middle of a run ends the recording, not the run: ``error`` then says why.
    """

    def __init__(self, path: Path, *, prompts: bool = False, **header: object) -> None:
        self._lock = threading.Lock()
        self._file: TextIO | None = path.open("w", encoding="utf-8")
        self._prompts = prompts
        self.error: OSError | None = None
        self._write({"schema": SCHEMA, "kind": "steppe-recording", **header})

    def admission(self, sequence: SequenceRecord, how: str, began: float, ended: float) -> None:
        """A sequence was seated: ``how`` is found, join or resume."""
        event: dict[str, object] = {
            "event": "admit",
            "how": how,
            "request": sequence.id,
            "seat": _seat(sequence.ref or ResidentRef()),
            "began": began,
            "ended": ended,
        }
        if self._prompts:
            request = sequence.request
            event["prompt"] = request.prompt if request.messages is None else None
            event["messages"] = request.messages
        self._write(event)

    def step(
        self,
        began: float,
        ended: float,
        before: PlannerSnapshot | None,
        batch: ImmutableStepBatch | ImmutablePrefillBatch | ImmutableDecodeBatch,
        result: StepResult | None,
    ) -> None:
        """A step ran, or raised (no ``result``). ``before`` is None in the seed's order."""
        self._write(
            {
                "event": "step",
                "began": began,
                "ended": ended,
                "before": None if before is None else _snapshot_out(before),
                "batch": _batch_out(batch),
                "result": None if result is None else _result_out(result),
            }
        )

    def close(self) -> None:
        """Stop, and flush what was written. Idempotent."""
        with self._lock:
            file, self._file = self._file, None
            if file is None:
                return
            try:
                file.close()
            except OSError as error:
                self.error = error

    def _write(self, event: dict[str, object]) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(json.dumps(event, separators=(",", ":"), default=str) + "\n")
            except OSError as error:
                self.error, self._file = error, None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step at which this planner decides otherwise. ``line`` counts from 1."""

    line: int
    recorded: ImmutableStepBatch
    planned: ImmutableStepBatch


@dataclass(frozen=True, slots=True)
class Replay:
    """How a replay went. ``unplanned`` steps ran in the seed's order, where nothing is decided."""

    steps: int
    unplanned: int
    divergence: Divergence | None


def read_recording(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every event of a recording with its line number; the header is the first.

    Raises ConfigError for a file that is no recording of this schema, or has a broken line. A last
    line that was cut short is where the recording ends.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
            except ValueError:
                if number > 1 and not line.endswith("\n"):
                    return
                raise ConfigError("recording", f"line {number} of {path} is not JSON") from None
            if number == 1 and (not isinstance(event, dict) or event.get("schema") != SCHEMA):
                raise ConfigError("recording", f"{path} is no recording of schema {SCHEMA}")
            yield number, event


def replay(path: Path) -> Replay:
    """Decide every recorded step again; stop at the first that comes out differently."""
    steps = unplanned = 0
    for line, event in read_recording(path):
        if event.get("event") != "step":
            continue
        if event["before"] is None:
            unplanned += 1
            continue
        steps += 1
        recorded = _batch_in(event["batch"])
        planned = plan(_snapshot_in(event["before"])).batch
        if planned != recorded:
            return Replay(steps, unplanned, Divergence(line, recorded, planned))
    return Replay(steps, unplanned, None)


# ---- values to JSON and back ---------------------------------------------------------------------


def _seat(ref: ResidentRef) -> list[int]:
    return [ref.slot, ref.epoch]


def _snapshot_out(before: PlannerSnapshot) -> dict[str, object]:
    return {
        "budget": before.budget,
        "measured": before.measured,
        "page_size": before.page_size,
        "free_pages": before.free_pages,
        "residents": [
            [
                *_seat(one.ref),
                one.prefill_remaining,
                one.decode_tokens,
                one.room,
                one.pages,
                one.follows,
            ]
            for one in before.residents
        ],
        "retire": [[*_seat(ref), reason.value] for ref, reason in before.retire],
    }


def _snapshot_in(event: dict[str, Any]) -> PlannerSnapshot:
    return PlannerSnapshot(
        event["budget"],
        event["page_size"],
        event["free_pages"],
        tuple(
            ResidentNeed(ResidentRef(slot, epoch), *need)
            for slot, epoch, *need in event["residents"]
        ),
        _retire_in(event["retire"]),
        event.get("measured", False),
    )


def _retire_in(entries: list[list[Any]]) -> tuple[tuple[ResidentRef, FinishReason], ...]:
    return tuple(
        (ResidentRef(slot, epoch), FinishReason(reason)) for slot, epoch, reason in entries
    )


def _batch_out(
    batch: ImmutableStepBatch | ImmutablePrefillBatch | ImmutableDecodeBatch,
) -> dict[str, object]:
    if isinstance(batch, ImmutablePrefillBatch):
        return {"prefill": _seat(batch.target)}
    if isinstance(batch, ImmutableDecodeBatch):
        return {"decode": [_seat(ref) for ref in batch.residents]}
    return {
        "decodes": [[*_seat(one.ref), one.query_length] for one in batch.decodes],
        "prefills": [[*_seat(one.ref), one.num_tokens] for one in batch.prefills],
        "retire": [[*_seat(ref), reason.value] for ref, reason in batch.retire],
        "preempt": [_seat(ref) for ref in batch.preempt],
    }


def _batch_in(event: dict[str, Any]) -> ImmutableStepBatch:
    return ImmutableStepBatch(
        tuple(DecodeEntry(ResidentRef(*ref), length) for *ref, length in event["decodes"]),
        tuple(PrefillEntry(ResidentRef(*ref), tokens) for *ref, tokens in event["prefills"]),
        _retire_in(event["retire"]),
        tuple(ResidentRef(*ref) for ref in event["preempt"]),
    )


def _result_out(result: StepResult) -> dict[str, object]:
    return {
        "ok": result.ok,
        "work": result.work.value,
        "step_id": result.step_id,
        "deltas": [[*_seat(ref), list(delta.token_ids)] for ref, delta in result.deltas],
        "finished": [
            [*_seat(ref), one.request_id, one.finish_reason.value, len(one.token_ids)]
            for ref, one in result.finished
        ],
        "preempted": [[*_seat(ref), seed.request_id] for ref, seed in result.preempted],
    }
