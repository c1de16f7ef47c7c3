"""``steppe plan`` from its command line, on a run recorded by ``steppe bench``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from steppe.cli import main
from tests.bench.test_cost import record
from tests.runtime.fakes import FakeBackend

if TYPE_CHECKING:
    from pathlib import Path

LOAD = ["--rate", "2", "--requests", "30", "--prompt-tokens", "4:20", "--output-tokens", "8"]


@pytest.fixture
def recording(tmp_path: Path, seed: int) -> str:
    record(tmp_path / "run.jsonl", seed)
    return str(tmp_path / "run.jsonl")


def test_a_run_recorded_by_bench_can_be_planned_with(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("steppe.llm.create_backend", lambda *_, **__: FakeBackend())
    run = str(tmp_path / "run.jsonl")
    words = ["bench", "--model", str(tiny), "--record", run, "--rate", "inf", "--requests", "8"]
    assert main([*words, "--prompt-tokens", "2:4", "--output-tokens", "20"]) == 0
    capsys.readouterr()
    assert main(["plan", run, "--requests", "5", "--prompt-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny, ")
    assert "as recorded" in out


def test_one_deployment(recording: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recording, *LOAD, "--slo-ttft", "1", "--slo-itl", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "4 ms per step, 0.4 ms per token" in out
    assert "time to first token" in out
    assert "30 of 30 requests answered" in out
    assert "goodput" in out
    assert "busy " in out
    assert "warning" not in out


def test_several_are_compared(
    recording: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "plan.json"
    words = ["--max-batch-size", "1,2", "--scheduling", "fcfs,fair", "--json", str(report)]
    assert (
        main(["plan", recording, *LOAD, "--rate", "1", "--sweep", "--slo-ttft", "1", *words]) == 0
    )
    assert "order" in capsys.readouterr().out
    written = json.loads(report.read_text())
    assert written["prices"]["step"] == pytest.approx(0.004, rel=1e-3)
    found = {
        (one["deployment"]["max_batch_size"], one["deployment"]["scheduling"]): one
        for one in written["variants"]
    }
    assert set(found) == {(1, "fcfs"), (1, "fair"), (2, "fcfs"), (2, "fair")}
    alone, pair = found[1, "fcfs"], found[2, "fcfs"]
    assert alone["occupancy"]["most_batch"] == 1
    assert 0 < alone["sweep"]["sustained"] < pair["sweep"]["sustained"]
    assert pair["summary"]["completed"] == 30


def test_what_the_recording_has_not_seen_is_said(
    recording: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", recording, *LOAD, "--rate", "inf", "--max-batch-size", "30"]
    assert main([*words, "--max-step-tokens", "200"]) == 0
    out = capsys.readouterr().out
    assert "sequences at once, this plan 30" in out
    assert "steps of at most 64 tokens, this plan 200" in out


def test_a_trace_that_does_not_fit_is_refused_request_by_request(
    recording: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at,prompt_tokens,output_tokens\n0,5000,1\n1,9000,2\n")
    assert main(["plan", recording, "--trace", str(trace)]) == 1
    assert "errors: 2 invalid_request" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sweep", "--trace", "t"], "sweep"),
        (["--slo-ttft", "0"], "slo_ttft"),
        (["--kv-memory", "10"], "hold no page"),
        (["--json", "no/such/folder/x.json"], "json"),
        (["--prompt-tokens", "9:1"], "lengths"),
    ],
)
def test_what_is_wrong_is_named(
    recording: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recording, *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--max-batch-size", "0"], ["--scheduling", "lifo"]])
def test_values_are_checked_as_they_are_parsed(
    recording: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", recording, *words])
    assert words[1] in capsys.readouterr().err
