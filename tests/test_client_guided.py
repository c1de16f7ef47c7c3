"""Guided requests through a client: a grammar holds up nobody while it is compiled."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from steppe import (
    LLM,
    InvalidRequestError,
    LLMGenerationRequest,
    SamplingParams,
)
from steppe.client import LocalClient
from steppe.request import Guided
from tests.server.support import staged, until
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from steppe.engine.handle import RequestHandle


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_tiny_model(tmp_path_factory.mktemp("client") / "tiny"), threads=1) as llm:
        yield llm


def guided(guide: Guided, max_tokens: int = 20) -> LLMGenerationRequest:
    return LLMGenerationRequest("a", params=SamplingParams(max_tokens=max_tokens, guided=guide))


def test_the_event_loop_goes_on_while_a_grammar_is_compiled(llm: LLM) -> None:
    async def main() -> None:
        client = LocalClient.of(llm)
        attack = asyncio.create_task(client.submit(guided(Guided(regex="c?" * 60_000))))
        await asyncio.sleep(0)  # compiled in here, it would be done by now
        turns = 0
        while not attack.done():
            await asyncio.sleep(0.001)
            turns += 1
        with pytest.raises(InvalidRequestError):
            await attack
        assert turns > 0
        handle = await client.submit(guided(Guided(choice=["yes", "no"])))
        assert (await handle.result()).text in ("yes", "no")

    asyncio.run(main())


def test_who_leaves_while_a_grammar_is_compiled_leaves_nothing_running() -> None:
    async def main() -> None:
        entered, go_on = threading.Event(), threading.Event()
        submitted: list[RequestHandle] = []
        async with staged() as stage:
            real = stage.engine.submit

            def slow(request: LLMGenerationRequest) -> RequestHandle:
                entered.set()
                assert go_on.wait(10)
                submitted.append(real(request))
                return submitted[0]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(stage.engine, "submit", slow)
                task = asyncio.create_task(stage.client.submit(guided(Guided(regex="[a-z]+"))))
                assert await asyncio.to_thread(entered.wait, 10)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                go_on.set()
                await until(lambda: bool(submitted) and submitted[0].stream_shared().cancelled)
            await stage.step()
            assert stage.engine.pending == 0
            assert stage.engine.metrics().cancelled == 1

    asyncio.run(main())
