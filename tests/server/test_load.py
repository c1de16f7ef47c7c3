"""Hundreds of clients at once, a third of which hang up whenever they like."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import tracemalloc
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from steppe.client import LocalClient
from steppe.server.app import create_app
from steppe.server.lifecycle import bind, server_for
from steppe.testing import assert_idle_clean
from tests.runtime import fakes
from tests.server.support import fake_llm

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

CLIENTS = 500
LEAVING = 0.3


async def one_client(
    port: int, number: int, leaves_after: int | None, begun: asyncio.Semaphore
) -> str:
    """One request by hand; how it ended: finished, left, or what was wrong."""
    async with begun:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stream = number % 3 != 0
    body = json.dumps(
        {"prompt": f"client {number}", "max_tokens": 24, "stream": stream, "ignore_eos": True}
    ).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    try:
        if leaves_after is not None:
            await reader.read(leaves_after) if leaves_after else None
            return "left"
        answer = await reader.read()
    finally:
        writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        return answer[:80].decode()
    if stream:
        return "finished" if answer.count(b'"length"') == 1 and b"[DONE]" in answer else "cut"
    return "finished" if b'"completion_tokens":24' in answer else "cut"


async def crowd(port: int, rng: np.random.Generator) -> Counter[str]:
    begun = asyncio.Semaphore(100)  # a listening socket has only so many places
    leaves = [
        int(rng.integers(0, 3000)) if rng.random() < LEAVING else None for _ in range(CLIENTS)
    ]
    ends = await asyncio.gather(
        *(one_client(port, i, after, begun) for i, after in enumerate(leaves))
    )
    assert ends.count("left") == sum(after is not None for after in leaves)
    return Counter(ends)


def kept_bytes() -> int:
    """What is allocated since tracing began, without the log of steps that the fake backend keeps.

    How many steps a crowd takes is the machine's affair: hundreds of kilobytes of that log.
    """
    ours = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(False, fakes.__file__), tracemalloc.Filter(False, tracemalloc.__file__)]
    )
    return sum(trace.size for trace in ours.traces)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_lost_and_nothing_stays(tmp_path: Path, rng: np.random.Generator) -> None:
    llm = fake_llm(tmp_path, max_batch_size=32, max_pending=2 * CLIENTS)
    with bind("127.0.0.1", 0) as sock, llm:
        client = LocalClient.of(llm)
        server = server_for(create_app(client), client, drain_timeout=5.0)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            port = sock.getsockname()[1]
            sizes: list[int] = []
            for _ in range(4):
                ends = asyncio.run(crowd(port, rng))
                assert set(ends) == {"finished", "left"}
                assert_idle_clean(llm.engine, timeout=20)
                end = time.monotonic() + 20
                while server.server_state.tasks and time.monotonic() < end:
                    time.sleep(0.01)
                assert not server.server_state.tasks
                gc.collect()
                if not tracemalloc.is_tracing():
                    tracemalloc.start()  # after the first round has filled every cache
                sizes.append(kept_bytes())
            metrics: Any = llm.engine.metrics()
            assert metrics.failed == 0
            assert metrics.submitted == metrics.completed + metrics.cancelled
            assert metrics.cancelled > 0
            # What a request left behind would be there after every round; a cache fills once.
            assert min(after - before for before, after in pairwise(sizes[1:])) < 150_000
        finally:
            tracemalloc.stop()
            server.should_exit = True
            thread.join()
