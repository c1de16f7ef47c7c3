"""``steppe bench`` from its command line, over a model whose arithmetic is made up."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

import pytest

from steppe.cli import main
from steppe.client import LocalClient
from steppe.server.app import create_app
from steppe.server.lifecycle import bind, server_for
from tests.runtime.fakes import FakeBackend
from tests.server.support import fake_llm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SMALL = ["--prompt-tokens", "2:4", "--output-tokens", "3", "--requests", "6", "--warmup", "1"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    llm = fake_llm(tmp_path_factory.mktemp("models"), max_batch_size=4)
    with bind("127.0.0.1", 0) as sock, llm:
        client = LocalClient.of(llm)
        server = server_for(create_app(client), client, drain_timeout=5.0)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_a_server(
    url: str, chat: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    status = main(["bench", "--url", url, "--rate", "inf", "--json", str(report), *SMALL, *chat])
    assert status == 0
    out = capsys.readouterr().out
    assert "time to first token" in out
    assert "6 of 6 requests answered" in out
    written = json.loads(report.read_text())
    assert written["target"] == f"tiny at {url.removeprefix('http://')}"
    (run,) = written["runs"]
    assert [one["output_tokens"] for one in run["requests"]] == [3] * 6
    assert run["summary"]["errors"] == {}


def test_a_model_in_this_process_and_a_trace(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("steppe.llm.create_backend", lambda *_, **__: FakeBackend())
    trace = tmp_path / "trace.csv"
    trace.write_text("at,prompt_tokens,output_tokens\n0,3,4\n0.01,2,5\n")
    report = tmp_path / "report.json"
    words = ["bench", "--model", str(tiny), "--trace", str(trace), "--json", str(report)]
    assert main([*words, *SMALL, "--slo-ttft", "60", "--slo-itl", "60"]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 requests answered" in out
    assert "goodput" in out
    written = json.loads(report.read_text())
    assert written["target"] == "tiny, in process"
    assert [one["output_tokens"] for one in written["runs"][0]["requests"]] == [4, 5]
    assert written["settings"]["trace"] == "trace.csv"


def test_a_sweep(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # How far it goes is another test's business; here a real run takes real time.
    monkeypatch.setattr("steppe.bench.sweep.MOST_DOUBLINGS", 1)
    plot, report = tmp_path / "sweep.png", tmp_path / "report.json"
    words = ["bench", "--url", url, "--sweep", "--rate", "100", "--json", str(report), *SMALL]
    if pytest.importorskip("matplotlib"):
        words += ["--plot", str(plot)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "requests a second" in out
    rates = [run["rate"] for run in json.loads(report.read_text())["runs"]]
    assert rates == sorted(rates)
    assert 100.0 in rates
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    assert main(["bench", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "steppe: connect: " in capsys.readouterr().err
    assert main(["bench", "--url", f"http://127.0.0.1:{port}", "--model", "x", *SMALL,
                 "--rate", "inf"]) == 1  # fmt: skip
    assert "errors: 6 connect" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give --url"),
        (["--url", "nonsense"], "url"),
        (["--model", "m", "--chat"], "chat"),
        (["--url", "http://a", "--sweep", "--trace", "t"], "sweep"),
        (["--url", "http://a", "--timeout", "0"], "timeout"),
        (["--url", "http://a", "--record", "run.jsonl"], "record"),
        (["--url", "http://a", "--slo-itl", "nan"], "slo_itl"),
        (["--url", "http://a", "--warmup", "-1"], "warmup"),
        (["--url", "http://a", "--prompt-tokens", "9:1", "--model", "m"], "lengths"),
        (["--url", "http://a", "--json", "no/such/folder/x.json"], "json"),
    ],
)
def test_what_is_wrong_is_named(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) != 0
    assert says in capsys.readouterr().err
