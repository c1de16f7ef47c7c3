"""The server as a process: how it begins, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from steppe.cli import main
from steppe.errors import ConfigError
from steppe.server.lifecycle import bind, listen
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
LONG = {
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "ignore_eos": True,
    "max_tokens": 60,
}


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process that listens, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.server.served", str(model), "--port", "0", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stderr=subprocess.PIPE,
        text=True,
    )
    # Whatever happens, no process and no test stays behind.
    guard = threading.Timer(50, process.kill)
    guard.start()
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert " at http://" in line, line + process.stderr.read()
        yield process, line.split(" at ")[1].split(": ")[0]
    finally:
        guard.cancel()
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def datas(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def test_sigterm_finishes_what_runs_and_exits_with_0(model: Path) -> None:
    with serving(model) as (process, url), httpx.Client(base_url=url, timeout=30) as client:
        assert client.get("/ready").status_code == 200
        with client.stream("POST", "/v1/chat/completions", json=LONG) as response:
            assert response.status_code == 200
            events = datas(response.iter_lines())
            first = next(events)
            process.send_signal(signal.SIGTERM)
            # The socket still listens, so that whoever asks is told.
            with httpx.Client(base_url=url, timeout=30) as other:
                while other.get("/ready").status_code == 200:
                    pass
                refused = other.post("/v1/chat/completions", json={**LONG, "stream": False})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert int(refused.headers["retry-after"]) >= 1
            rest = list(events)
        assert first["choices"][0]["delta"]["role"] == "assistant"
        assert rest[-1] == "[DONE]"
        assert rest[-2]["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0


@pytest.mark.slow
def test_a_stream_that_nobody_reads_keeps_no_process(model: Path) -> None:
    with serving(model, "--drain-timeout", "20") as (process, url):
        with httpx.Client(base_url=url, timeout=30) as client:
            asked = {"x-steppe-resume": "300"}
            with client.stream("POST", "/v1/chat/completions", json=LONG, headers=asked) as one:
                assert next(one.iter_lines())
        # The client has gone; its request, of more than a second, may go on, and is finished.
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_second_signal_cuts_the_drain_short(model: Path) -> None:
    with serving(model, "--drain-timeout", "600", "--max-step-tokens", "8") as (process, url):
        with (
            httpx.Client(base_url=url, timeout=30) as client,
            client.stream(
                "POST", "/v1/chat/completions", json={**LONG, "max_tokens": 200}
            ) as response,
        ):
            events = datas(response.iter_lines())
            next(events)
            process.send_signal(signal.SIGINT)
            with httpx.Client(base_url=url, timeout=30) as other:
                while other.get("/ready").status_code == 200:
                    pass
            process.send_signal(signal.SIGINT)
            rest = list(events)
        assert rest[-1] == "[DONE]"
        assert rest[-2]["error"]["code"] == "shutting_down"
        assert process.wait(30) == 0


def test_a_taken_port_is_said_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status = main(["serve", str(tmp_path / "no-model"), "--port", port])
    assert status not in (0, None)
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError) as caught:
        bind("no.such.host.invalid", 0)
    assert caught.value.field == "host"


def test_a_server_binds_to_what_it_was_told() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
        assert sock.getsockname()[1] > 0


def test_of_two_that_were_bound_at_once_one_listens() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            assert listen(first) == ("127.0.0.1", port)
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
                listen(second)


@pytest.mark.slow
def test_a_real_model_answers_over_http(model: Path) -> None:
    command = [sys.executable, "-m", "steppe", "serve", str(model), "--port", "0"]
    with subprocess.Popen(
        [*command, "--backend", "torch"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split(" at ")[1].split(": ")[0]
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60)
        process.send_signal(signal.SIGTERM)
        assert answer.status_code == 200
        assert process.wait(30) == 0
