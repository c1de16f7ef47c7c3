"""A server of several processes, one of which is killed while everybody streams."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from steppe.replicas.runners.process import ChildSpec, ProcessRunner
from tests.replicas.engines import FACTORY
from tests.replicas.killing import kill_under_load
from tests.replicas.test_process import gone
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]


async def test_without_a_chunk_they_finish_elsewhere_others_get_one_error_each() -> None:
    spec = ChildSpec(factory=f"{FACTORY}:scripted", options={"step_seconds": 0.004})
    await kill_under_load([ProcessRunner(spec) for _ in range(3)], requests=240, pause=0.8)


@contextmanager
def server(model: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "steppe", "serve", str(model), "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            found = re.search(r"http://[\d.]+:\d+", line)
            assert found, line
            assert "2 replicas" in line
            yield found[0], process
        finally:
            process.kill()


def post(url: str, body: str) -> Any:
    request = urllib.request.Request(
        url, body.encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def children_of(pid: int) -> list[int]:
    done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


async def test_the_command_serves_survives_a_kill_and_ends_in_order(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", temperature=0.0)
    with server(model, "--replicas", "2", "--policy", "round-robin") as (url, process):
        body = '{"prompt": "hello", "max_tokens": 6, "temperature": 0}'
        first = await asyncio.to_thread(post, f"{url}/v1/completions", body)
        text = re.search(r'"text":"(.*?)","', first)
        assert text
        children = children_of(process.pid)
        assert len(children) == 2
        os.kill(children[0], signal.SIGKILL)
        for _ in range(6):
            again = await asyncio.to_thread(post, f"{url}/v1/completions", body)
            assert text[0] in again, "whoever answers says the same"

        def restarted() -> bool:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                page = answer.read().decode()
            ready = re.findall(r"steppe_replica_in_rotation\{.*?\} 1\.0", page)
            starts = re.findall(r"steppe_replica_starts_total\{.*?\} (\d)\.0", page)
            return len(ready) == 2 and sorted(starts) == ["1", "2"]

        while not await asyncio.to_thread(restarted):  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
    assert all(gone(pid) for pid in children)


async def test_a_hangup_replaces_the_processes_and_no_request_is_lost(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", temperature=0.0)
    with server(model, "--replicas", "2", "--policy", "round-robin") as (url, process):
        before = children_of(process.pid)
        body = '{"prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": true}'
        texts: set[str] = set()
        done = asyncio.Event()

        async def ask_on() -> int:
            count = 0
            while not done.is_set():
                answer = await asyncio.to_thread(post, f"{url}/v1/completions", body)
                texts.update(re.findall(r'"text":".*?",', answer))
                count += 1
            return count

        def names() -> set[str]:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                page = answer.read().decode()
            return set(re.findall(r'steppe_replica_in_rotation\{replica="(.*?)"\} 1\.0', page))

        asking = [asyncio.ensure_future(ask_on()) for _ in range(4)]
        process.send_signal(signal.SIGHUP)
        try:
            while await asyncio.to_thread(names) != {"0.2", "1.2"}:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        finally:
            done.set()
        assert min(await asyncio.gather(*asking)) >= 1, "each answered, or raised"
        assert len(texts) == 1, "whoever answers says the same"
        # The last of them may still be closing when its successor is in rotation.
        while not all(gone(pid) for pid in before):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)
        after = sorted(set(children_of(process.pid)) - set(before))
        assert len(after) == 2
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
    assert all(gone(pid) for pid in after)
