"""``steppe generate --input --output``: every line answered once, whatever happens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from steppe import LLM
from steppe.cli import main

if TYPE_CHECKING:
    from pathlib import Path


def write_lines(path: Path, jobs: list[Any]) -> Path:
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


JOBS: list[dict[str, Any]] = [
    {"id": f"job {i}", "prompt": f"number {i}", "params": {"seed": i, "max_tokens": 3 + i % 4}}
    for i in range(9)
]


def answer(tiny: Path, source: Path, target: Path, *flags: str) -> int:
    return main(["generate", str(tiny), "--input", str(source), "--output", str(target), *flags])


def test_answers_come_in_order_and_equal_single_ones(tiny: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", JOBS)
    target = tmp_path / "out.jsonl"
    assert answer(tiny, source, target) == 0
    records = read_lines(target)
    assert [record["line"] for record in records] == list(range(1, 10))
    assert [record["id"] for record in records] == [job["id"] for job in JOBS]
    with LLM(tiny) as llm:
        for job, record in zip(JOBS, records, strict=True):
            alone = llm.chat(
                [{"role": "user", "content": job["prompt"]}], llm.sampling_params(**job["params"])
            )
            assert tuple(record["token_ids"]) == alone.token_ids
            assert record["text"] == alone.text


def test_an_interrupted_run_goes_on_where_it_stopped(tiny: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", JOBS)
    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert answer(tiny, source, whole) == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    # Four whole answers, and one that the interruption cut in the middle.
    target.write_bytes(b"".join(lines[:4]) + lines[4][:20])
    assert answer(tiny, source, target) == 0
    assert target.read_bytes() == whole.read_bytes()
    assert answer(tiny, source, target) == 0
    assert target.read_bytes() == whole.read_bytes()


def test_a_bad_line_becomes_an_error_object_and_costs_nobody_else(
    tiny: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    good = json.dumps(JOBS[0])
    bad = [
        "{not json",
        "[1, 2]",
        json.dumps({"prompt": "x", "messages": []}),
        json.dumps({"prompt": ""}),
        json.dumps({"prompt": "x", "params": {"temperature": -1}}),
        json.dumps({"prompt": "x", "params": {"no_such": 1}}),
        json.dumps({"prompt": [999999]}),
        json.dumps({"prompt": "x", "surprise": True}),
    ]
    source.write_text("\n".join([good, *bad, good]) + "\n")
    target = tmp_path / "out.jsonl"
    assert answer(tiny, source, target) == 1
    records = read_lines(target)
    assert [record["line"] for record in records] == list(range(1, len(bad) + 3))
    assert "error" not in records[0]
    assert records[0]["token_ids"] == records[-1]["token_ids"]
    for record in records[1:-1]:
        assert record["error"]["type"] == "InvalidRequestError", record
        assert record["error"]["message"]
    assert records[5]["error"]["field"] == "temperature"


def test_flags_apply_to_every_line_and_a_line_overrides_them(tiny: Path, tmp_path: Path) -> None:
    jobs = [{"prompt": "a"}, {"prompt": "a", "params": {"max_tokens": 2}}]
    source = write_lines(tmp_path / "in.jsonl", jobs)
    target = tmp_path / "out.jsonl"
    assert answer(tiny, source, target, "--max-tokens", "5", "--ignore-eos", "--raw") == 0
    first, second = read_lines(target)
    assert len(first["token_ids"]) == 5
    assert len(second["token_ids"]) == 2
    assert first["usage"]["prompt_tokens"] == 1


def test_several_answers_to_one_line_stay_together(tiny: Path, tmp_path: Path) -> None:
    jobs = [{"prompt": "a", "params": {"n": 3, "seed": 1, "max_tokens": 2}}]
    source = write_lines(tmp_path / "in.jsonl", jobs)
    target = tmp_path / "out.jsonl"
    assert answer(tiny, source, target) == 0
    (record,) = read_lines(target)
    assert len(record["outputs"]) == 3


def test_a_file_that_is_something_else_is_not_written_to(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", JOBS)
    target = tmp_path / "precious.txt"
    target.write_text("my diary\nsecond line\n")
    assert answer(tiny, source, target) == 2
    assert target.read_text() == "my diary\nsecond line\n"
    assert "precious.txt" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--input", "x"], ["--output", "x"]])
def test_both_files_are_needed(
    tiny: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tiny), *flags]) == 2
    assert "input" in capsys.readouterr().err
