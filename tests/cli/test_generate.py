"""``steppe generate``, one prompt."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from steppe import LLM, SamplingParams
from steppe.cli import main

if TYPE_CHECKING:
    from pathlib import Path


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["generate", *words, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_it_prints_what_the_library_says(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(tiny), "Hello", "--max-tokens", "12", "--temperature", "0"]
    assert main(words) == 0
    with LLM(tiny) as llm:
        params = SamplingParams(temperature=0, top_k=20, max_tokens=12)
        answer = llm.chat([{"role": "user", "content": "Hello"}], params)
    assert capsys.readouterr().out == answer.text + "\n"


def test_raw_continues_the_prompt_without_a_template(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_json(capsys, str(tiny), "Hello", "--raw", "--max-tokens", "12", "--seed", "5")
    assert report["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "cached_tokens": 0}
    with LLM(tiny) as llm:
        answer = llm.generate("Hello", llm.sampling_params(max_tokens=12, seed=5))
    assert report["text"] == answer.text
    assert tuple(report["token_ids"]) == answer.token_ids


def test_json_says_which_parameters_applied_and_where_they_came_from(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_json(capsys, str(tiny), "Hi", "--max-tokens", "3", "--top-k", "7")
    sampling = report["sampling"]
    assert sampling["top_k"] == {"value": 7, "from": "flag"}
    assert sampling["temperature"] == {"value": 0.7, "from": "generation_config"}
    assert sampling["top_p"] == {"value": 1.0, "from": "default"}
    assert report["finish_reason"] in ("length", "stop")


def test_logprobs_come_with_their_tokens(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, str(tiny), "Hi", "--max-tokens", "4", "--logprobs", "2")
    assert [one["token_id"] for one in report["logprobs"]] == report["token_ids"]
    for one in report["logprobs"]:
        assert any(other["token_id"] == one["token_id"] for other in one["top"])
        assert 2 <= len(one["top"]) <= 3


def test_a_dash_reads_the_prompt_from_stdin(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    piped = run_json(capsys, str(tiny), "-", "--max-tokens", "4", "--seed", "1")
    given = run_json(capsys, str(tiny), "Hello", "--max-tokens", "4", "--seed", "1")
    assert piped["token_ids"] == given["token_ids"]


def test_a_system_message_reaches_the_template(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_json(capsys, str(tiny), "Hi", "--system", "Be brief", "--max-tokens", "1")
    with LLM(tiny) as llm:
        messages = [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "Hi"},
        ]
        answer = llm.chat(messages, SamplingParams(max_tokens=1))
    assert report["usage"]["prompt_tokens"] == answer.usage.prompt_tokens


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["", "--max-tokens", "3"], "prompt"),
        ([" \n", "--max-tokens", "3"], "prompt"),
        (["hi", "--temperature", "-1"], "temperature"),
        (["hi", "--max-tokens", "0"], "max_tokens"),
        (["hi", "--max-tokens", "100000"], "max_tokens"),
        (["hi" * 300], "messages"),
        (["hi", "--top-p", "nan"], "top_p"),
        (["hi", "--raw", "--system", "x"], "system"),
        ([], "prompt"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(
    tiny: Path, words: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tiny), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"steppe: {field}:" in err


def test_an_unknown_backend_is_refused_by_name(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tiny), "hi", "--backend", "abacus"]) == 1
    assert "abacus" in capsys.readouterr().err
