"""``steppe trace FILE -o trace.json``: a recorded run as a picture.

The format is Chrome's trace events, which Perfetto and ``chrome://tracing`` open. There is one row
per seat and one for the engine; a slice is one step, or one admission.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe.engine.recording import read_recording

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

__all__ = ["add_arguments", "chrome_trace", "run", "trace_command"]

SHORTEST = 0.001
"""Microseconds. Viewers drop slices without length; a simulated step may take no time at all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a recording: engine.record(FILE)")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="the trace to write"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the trace."""
    return trace_command(arguments.file, arguments.output)


def trace_command(path: Path, output: Path) -> int:
    """Write the trace of recording ``path`` to ``output``, and say so; the exit status is 0.

    Raises ConfigError for a file that is no recording, OSError where files cannot be used.
    """
    trace = chrome_trace(path)
    output.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")
    print(f"{output}: {len(trace['traceEvents'])} events; open it at ui.perfetto.dev")
    return 0


def chrome_trace(path: Path) -> dict[str, Any]:
    """The recording as a trace-event document. Its times start at 0."""
    slices: list[dict[str, Any]] = []
    start: float | None = None
    step = 0
    names: dict[int, int] = {}
    for _, event in read_recording(path):
        if "event" not in event:
            continue
        if start is None:
            start = event["began"]
        ts = (event["began"] - start) * 1e6
        dur = max(SHORTEST, (event["ended"] - event["began"]) * 1e6)
        if event["event"] == "admit":
            slot, _ = event["seat"]
            names[slot] = event["request"]
            slices.append(
                _slice(0, f"{event['how']} {event['request']}", "admit", ts, dur, {"seat": slot})
            )
            continue
        step += 1
        slices += _step(step, event, names, ts, dur)
    rows = sorted({one["tid"] for one in slices})
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "steppe"}},
            *(
                {
                    "ph": "M",
                    "pid": 1,
                    "tid": row,
                    "name": "thread_name",
                    "args": {"name": f"seat {row - 1}" if row else "engine"},
                }
                for row in rows
            ),
            *slices,
        ],
    }


def _step(
    number: int, event: dict[str, Any], names: dict[int, int], ts: float, dur: float
) -> Iterator[dict[str, Any]]:
    """The slices of one step: the engine's, and one of every seat that took part."""
    batch, result = event["batch"], event["result"]
    tokens = {slot: ids for slot, _, ids in result["deltas"]} if result else {}
    ended = {one[0]: one[3] for one in result["finished"]} if result else {}
    outcome = "ok" if result and result["ok"] else "failed"
    yield _slice(0, f"step {number}", "step", ts, dur, {"outcome": outcome})
    for kind, slot, length in _parts(batch):
        args: dict[str, Any] = {"request": names.get(slot), "step": number}
        if length:
            args["query_length"] = length
        if slot in tokens:
            args["tokens"] = tokens[slot]
        if slot in ended:
            args["finished"] = ended[slot]
        yield _slice(slot + 1, f"{names.get(slot, '?')} {kind}", kind, ts, dur, args)


def _parts(batch: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    if "prefill" in batch:
        yield "prefill", batch["prefill"][0], 0
    elif "decode" in batch:
        for slot, _ in batch["decode"]:
            yield "decode", slot, 1
    else:
        for slot, _, length in batch["decodes"]:
            yield "decode", slot, length
        for slot, _, length in batch["prefills"]:
            yield "prefill", slot, length
        for slot, *_ in batch["retire"]:
            yield "retire", slot, 0
        for slot, *_ in batch["preempt"]:
            yield "preempt", slot, 0


def _slice(
    row: int, name: str, kind: str, ts: float, dur: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": row,
        "name": name,
        "cat": kind,
        "ts": round(ts, 3),
        "dur": round(dur, 3),
        "args": args,
    }
