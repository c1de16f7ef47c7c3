"""Replicas as Ray actors, on a local cluster of several node processes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from steppe.cli import serve
from steppe.cli.serve_replicas import coordinator_of
from steppe.errors import CheckpointError, ConfigError, ReplicaLostError, UnsupportedRequestError
from steppe.replicas.engine_core import EngineCoreActor, LocalEngineConfig
from steppe.replicas.output import whole_response
from steppe.replicas.runners.peer import ChildSpec
from steppe.replicas.vocabulary import ReplicaState
from steppe.request import LLMGenerationRequest, SamplingParams
from tests.replicas.engines import FACTORY
from tests.replicas.helpers import NoText, ask, batch, collect
from tests.replicas.killing import kill_under_load
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed: this did not run")

from steppe.replicas.ray import RayResources, RayRunner, join_cluster  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.anyio,
    pytest.mark.timeout(600),
    # Ray's own sockets and files, closed when it sees fit.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ROOT = Path(__file__).resolve().parents[2]
STORE = 80 * 2**20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without room for engines, and two nodes with a place for one each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": STORE,
            },
        )
        for _ in range(2):
            made.add_node(num_cpus=1, resources={"engine": 1}, object_store_memory=STORE)
        try:
            join_cluster(made.address)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def runner_of(factory: str = "scripted", start_timeout: float = 60.0, **options: Any) -> RayRunner:
    spec = ChildSpec(factory=f"{FACTORY}:{factory}", options=options)
    place = RayResources(resources={"engine": 1}, start_timeout=start_timeout)
    return RayRunner(spec, place)


@contextlib.asynccontextmanager
async def started(**options: Any) -> AsyncIterator[RayRunner]:
    runner = runner_of(**options)
    await runner.start()
    try:
        yield runner
    finally:
        await runner.close()


async def test_requests_run_there_and_everything_comes_back(cluster: Any) -> None:
    async with started() as runner:
        assert runner.card.name == "scripted"
        answers = await asyncio.gather(
            *[collect(runner, batch(10 * i, max_tokens=50)) for i in range(1, 9)]
        )
        for chunks in answers:
            assert len(whole_response(chunks).token_ids) == 50
        with pytest.raises(UnsupportedRequestError) as refused:
            await collect(runner, batch(6, n=100))
        assert refused.value.field == "n"
        status = await runner.status()
        assert status.health.ok
        assert (status.metrics.submitted, status.metrics.completed) == (8, 8)
        stream = await runner.execute(batch(700, max_tokens=4000))
        await anext(stream)
        assert {one.request_id for one in (await runner.activity()).live} <= {700}
        await stream.aclose()
        while (await runner.status()).metrics.cancelled == 0:  # noqa: ASYNC110 - it is far away
            await asyncio.sleep(0.001)


async def test_a_reader_who_does_not_read_costs_bounded_memory_and_nobody_else(
    cluster: Any,
) -> None:
    async with started() as runner:
        unread = await runner.execute(batch(1, max_tokens=3000))
        answer = whole_response(await collect(runner, batch(2, max_tokens=40)))
        assert len(answer.token_ids) == 40
        assert len(whole_response([chunk async for chunk in unread]).token_ids) == 3000


async def test_a_model_that_cannot_be_loaded_says_why(cluster: Any) -> None:
    with pytest.raises(CheckpointError, match="cut short"):
        await runner_of("broken").start()
    with pytest.raises(ReplicaLostError):
        await runner_of("deadly").start()
    async with started() as runner:  # the place was given back
        assert await collect(runner, batch())


async def test_without_a_place_in_the_cluster_it_does_not_wait_for_ever(cluster: Any) -> None:
    async with started(), started():
        with pytest.raises(ReplicaLostError, match="no room"):
            await runner_of(start_timeout=0.5).start()


async def test_an_actor_that_dies_under_load_comes_back_and_nothing_hangs(cluster: Any) -> None:
    config = LocalEngineConfig(restart_pause=0.01)
    replica = EngineCoreActor(runner_of(step_seconds=0.01), config, text=NoText())
    await replica.start()
    runner = replica.runner
    assert isinstance(runner, RayRunner)
    handles = [await replica.submit(ask(max_tokens=4000)) for _ in range(4)]
    chunks = aiter(handles[0])
    await anext(chunks)
    assert runner.pid is not None
    os.kill(runner.pid, signal.SIGKILL)
    for handle in handles:
        with pytest.raises(ReplicaLostError):
            await handle.result()
    async with asyncio.timeout(60):
        while replica.generation < 2:  # noqa: ASYNC110 - it is far away
            await asyncio.sleep(0.01)
    assert len((await (await replica.submit(ask())).result()).token_ids) == 4
    await replica.drain(10.0)
    assert replica.state is ReplicaState.STOPPED


async def test_without_a_chunk_they_finish_elsewhere_others_get_one_error_each(
    cluster: Any,
) -> None:
    runners = [runner_of(step_seconds=0.004) for _ in range(2)]
    await kill_under_load(runners, requests=240, pause=2.0)


async def test_serve_puts_its_replicas_there(cluster: Any, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    words = [str(model), "--replicas", "2", "--ray", cluster.address, "--kv-memory", "16M"]
    coordinator = coordinator_of(parser.parse_args(words))
    await coordinator.start()
    try:
        params = SamplingParams(temperature=0, max_tokens=5)
        handles = [
            await coordinator.submit(LLMGenerationRequest([5, 6, 7], params=params))
            for _ in range(6)
        ]
        answers = {(await handle.result()).token_ids for handle in handles}
        assert len(answers) == 1
        assert len(coordinator.replicas()) == 2
    finally:
        await coordinator.drain(10.0)


def test_another_asks_for_the_same_place() -> None:
    spec, place = ChildSpec(options={"a": 1}), RayResources(num_cpus=2.0, num_gpus=1.0)
    one = RayRunner(spec, place)
    other = one.another()
    assert other is not one
    assert (other._spec, other._resources) == (spec, place)
    assert other.transport_kind is one.transport_kind


def test_settings_that_make_no_sense_are_named() -> None:
    for field, value in {"num_cpus": -1.0, "num_gpus": float("nan"), "start_timeout": 0.0}.items():
        with pytest.raises(ConfigError) as caught:
            RayResources(**{field: value})
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="cores"):
        RayRunner(ChildSpec(cores=[0]))
    with pytest.raises(ConfigError, match="environment"):
        RayRunner(ChildSpec(environment={"CUDA_VISIBLE_DEVICES": "0"}))
