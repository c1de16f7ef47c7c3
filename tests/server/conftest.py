"""A real server in this process, for clients that speak HTTP.

Everything of it is real but the arithmetic: the backend is the one of the runtime tests, which
takes no time to start.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from steppe.client import LocalClient
from steppe.server.app import create_app
from steppe.server.lifecycle import DrainingServer, bind, server_for
from tests.server.support import fake_llm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from steppe import LLM


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Live:
    """A server that listens, and the model behind it."""

    url: str
    llm: LLM
    server: DrainingServer


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The tiny model, served on a free port."""
    llm = fake_llm(tmp_path_factory.mktemp("models"), max_batch_size=8, max_pending=32)
    with bind("127.0.0.1", 0) as sock, llm:
        client = LocalClient.of(llm)
        server = server_for(create_app(client), client, drain_timeout=5.0)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        while not server.started:
            time.sleep(0.005)
        yield Live(f"http://127.0.0.1:{sock.getsockname()[1]}", llm, server)
        server.should_exit = True
        thread.join()
