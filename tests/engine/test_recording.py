"""A run is written, decided again, and drawn."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from steppe.cli.replay import replay_command
from steppe.cli.trace import chrome_trace, trace_command
from steppe.engine.recording import SCHEMA, read_recording, replay
from steppe.errors import ConfigError
from steppe.testing import FakeClock, LinearCost

from .helpers import ask, run, tick

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeEngine


@pytest.fixture
def recording(make_engine: MakeEngine, tmp_path: Path) -> Path:
    """A run with joins, preemptions, a cancel and a failed step."""
    clock = FakeClock()
    engine, _ = make_engine(
        capacity=3,
        pages=6,
        page_size=4,
        overcommit=True,
        cost=LinearCost(clock, 0.001, 0.0005, 0.0001),
        fail_steps={30: RuntimeError("boom")},
        config={"clock": clock, "max_step_tokens": 6},
    )
    path = tmp_path / "run.jsonl"
    with engine.record(path):
        handles = [engine.submit(ask(9, prompt=5)) for _ in range(6)]
        tick(engine, 8)
        handles[1].cancel()
        run(engine)
        assert engine.metrics().preemptions
    engine.submit(ask(2))
    run(engine)
    return path


def test_a_recording_is_decided_again_the_same(recording: Path, capsys: Any) -> None:
    done = replay(recording)
    assert done.divergence is None
    assert done.steps > 20
    assert done.unplanned == 0
    assert replay_command(recording) == 0
    assert f"{done.steps} steps" in capsys.readouterr().out


def test_the_first_divergence_is_found(recording: Path, tmp_path: Path, capsys: Any) -> None:
    lines = recording.read_text().splitlines()
    for number, line in enumerate(lines):
        event = json.loads(line)
        if event.get("event") == "step" and event["batch"]["decodes"] and number > 12:
            event["batch"]["decodes"].pop()
            lines[number] = json.dumps(event)
            break
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(lines) + "\n")
    done = replay(other)
    assert done.divergence is not None
    assert done.divergence.line == number + 1
    assert replay_command(other) == 1
    assert f"line {number + 1}" in capsys.readouterr().out


def test_events_say_who_came_and_what_ran_and_nothing_after_close(recording: Path) -> None:
    events = [event for _, event in read_recording(recording)]
    assert events[0]["schema"] == SCHEMA
    assert events[0]["max_batch_size"] == 3
    how = [event["how"] for event in events if event.get("event") == "admit"]
    assert how[0] == "found"
    assert {"join", "resume"} <= set(how)
    failed = [event for event in events if event.get("event") == "step" and not event["result"]]
    assert len(failed) == 1, "a step that raised is there, without a result"
    assert all("prompt" not in event for event in events)
    assert max(event["request"] for event in events if event.get("event") == "admit") == 6


def test_prompts_are_written_when_asked_for(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, _ = make_engine()
    path = tmp_path / "run.jsonl"
    engine.record(tmp_path / "first.jsonl")
    engine.record(path, prompts=True)
    engine.submit(ask(1, prompt=2))
    run(engine)
    engine.shutdown()
    (admit,) = [event for _, event in read_recording(path) if event.get("event") == "admit"]
    assert admit["prompt"] == [1, 2]


def test_the_seeds_order_is_recorded_and_has_no_decisions(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine, runtime = make_engine(mixed=False)
    with engine.record(tmp_path / "run.jsonl"):
        for _ in range(3):
            engine.submit(ask(3))
        run(engine)
    done = replay(tmp_path / "run.jsonl")
    assert (done.steps, done.unplanned) == (0, runtime.steps)


def test_a_trace_has_a_row_per_seat_and_a_slice_per_step(recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    assert trace_command(recording, out) == 0
    trace = json.loads(out.read_text())
    assert trace == chrome_trace(recording)
    events = trace["traceEvents"]
    rows = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in slices} == set(rows)
    assert {"seat 0", "seat 1", "seat 2", "engine"} == set(rows.values())
    for event in slices:
        assert event["dur"] > 0
        assert event["ts"] >= 0
    kinds = {event["cat"] for event in slices}
    assert {"decode", "prefill", "step"} <= kinds
    # Slices of one row never overlap.
    for row in rows:
        ends = 0.0
        for event in sorted((e for e in slices if e["tid"] == row), key=lambda e: e["ts"]):
            assert event["ts"] >= ends - 1e-3
            ends = event["ts"] + event["dur"]


def test_a_disk_that_fails_ends_the_recording_and_not_the_run(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine, _ = make_engine()
    recorder = engine.record(tmp_path / "run.jsonl")
    full = OSError(28, "no space left")

    class FullDisk:
        def write(self, text: str) -> int:
            raise full

        def close(self) -> None:
            raise full

    before, recorder._file = recorder._file, FullDisk()  # type: ignore[assignment]
    assert before is not None
    before.close()
    handle = engine.submit(ask(3))
    run(engine)
    assert handle.get().token_ids
    assert recorder.error is full
    recorder.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", None),
        ("nonsense\n", "line 1"),
        ('{"schema":99}\n', "schema"),
        ("[1]\n", "schema"),
        ('{"schema":1}\n{"event"\n{}\n', "line 2"),
        ('{"schema":1}\n{"event":"st', None),
    ],
)
def test_broken_files_are_named_and_a_cut_end_is_an_end(
    tmp_path: Path, text: str, message: str | None
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    if message is None:
        assert replay(path).steps == 0
    else:
        with pytest.raises(ConfigError, match=message):
            replay(path)
