"""``steppe serve`` with servers elsewhere behind it."""

from __future__ import annotations

import argparse
import threading
import time
from typing import TYPE_CHECKING

import pytest

from steppe import LLMGenerationRequest, SamplingParams
from steppe.cli import serve
from steppe.cli.serve_replicas import coordinator_of, successor_of
from steppe.client import LocalClient
from steppe.errors import ConfigError
from steppe.replicas.runners.process import ProcessRunner
from steppe.replicas.vocabulary import TransportKind
from steppe.server.app import create_app
from steppe.server.lifecycle import bind, server_for
from steppe.server.settings import ServerSettings
from tests.server.support import fake_llm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from steppe import LLM

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[LLM, str]]:
    """A model, and a server of it that asks for a key."""
    llm = fake_llm(tmp_path, max_batch_size=4)
    with bind("127.0.0.1", 0) as sock, llm:
        client = LocalClient.of(llm)
        settings = ServerSettings(api_keys=("secret",))
        server = server_for(create_app(client, settings), client, drain_timeout=5.0)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield llm, f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


async def test_requests_run_at_the_server_elsewhere(
    far: tuple[LLM, str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, url = far
    monkeypatch.setenv(serve.REPLICA_KEY_VARIABLE, "secret")
    arguments = parsed(str(tiny), "--replica", url, "--max-pending", "8")
    coordinator = coordinator_of(arguments)
    await coordinator.start()
    try:
        card = coordinator.card
        assert (card.context_length, card.vocab_size) == (
            llm.context_length,
            llm.tokenizer.vocab_size,
        )
        params = SamplingParams(temperature=0, max_tokens=7)
        handle = await coordinator.submit(LLMGenerationRequest("abc", params=params))
        wanted = llm.generate("abc", params)
        response = await handle.result()
        assert (response.text, response.token_ids) == (wanted.text, wanted.token_ids)
        (report,) = coordinator.replicas()
        assert report.in_flight == 0
        line = serve.startup_line(card, arguments, ServerSettings(), "::1", 81)
        assert "replicas" not in line
    finally:
        await coordinator.drain(5.0)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--replicas", "0"), "replicas"),
        (("--replica", "far:8000"), "url"),
        (("--policy", "mine", "--replicas", "2"), "policy"),
        (("--ray", "--ray-cpus", "-1"), "num_cpus"),
        (("--replicas", "2", "--gpus", "0"), "gpus"),
        (("--replica", "http://far:8000", "--gpus", "0"), "gpus"),
        (("--ray", "--gpus", "0"), "gpus"),
    ],
)
def test_what_makes_no_sense_is_named(tiny: Path, words: tuple[str, ...], field: str) -> None:
    if "--ray" in words:
        pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with pytest.raises(ConfigError) as caught:
        coordinator_of(parsed(str(tiny), *words))
    assert caught.value.field == field


def test_every_engine_of_its_own_sees_its_own_gpus(tiny: Path) -> None:
    words = ("--replicas", "2", "--gpus", "0,1", "--load-timeout", "90")
    coordinator = coordinator_of(parsed(str(tiny), *words))
    specs = []
    for seat in coordinator._rotation.seats.values():
        runner = seat.actor.runner
        assert isinstance(runner, ProcessRunner)
        assert runner.transport_kind is TransportKind.LOCAL_GPU
        assert seat.actor.config.max_loading == 90.0
        specs.append(runner._spec.environment)
    assert specs == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]


@pytest.mark.parametrize(("words", "each"), [((), None), (("--max-pending-tokens", "101"), 51)])
def test_prompt_tokens_that_may_wait_are_shared_too(
    tiny: Path, words: tuple[str, ...], each: int | None
) -> None:
    coordinator = coordinator_of(parsed(str(tiny), "--replicas", "2", *words))
    for actor in coordinator.actors:
        assert isinstance(actor.runner, ProcessRunner)
        assert actor.runner._spec.options["max_pending_tokens"] == each


async def test_a_successor_is_the_same_again_and_none_is_made_of_a_server_elsewhere(
    tiny: Path,
) -> None:
    words = ("--replicas", "1", "--replica", "http://far:8000", "--kv-memory", "4M")
    ours, theirs = coordinator_of(parsed(str(tiny), *words)).actors
    assert successor_of(theirs, "1.2") is None
    new = successor_of(ours, "0.2")
    assert new is not None
    assert (new.name, new.config) == ("0.2", ours.config)
    old_runner, new_runner = ours.runner, new.runner
    assert isinstance(old_runner, ProcessRunner)
    assert isinstance(new_runner, ProcessRunner)
    assert new_runner is not old_runner
    assert new_runner._spec == old_runner._spec
    assert new_runner._formats == old_runner._formats
    assert new_runner.transport_kind is old_runner.transport_kind


def test_one_engine_in_this_process_is_dealt_no_gpus() -> None:
    with pytest.raises(ConfigError, match="one engine") as refused:
        serve.run(parsed("m", "--gpus", "0", "--port", "0"))
    assert refused.value.field == "gpus"


def test_several_are_said_at_the_start() -> None:
    assert serve.engines(parsed("m")) == 1
    assert serve.engines(parsed("m", "--replica", "http://far")) == 0
    assert serve.engines(parsed("m", "--replica", "http://far", "--replicas", "2")) == 2
