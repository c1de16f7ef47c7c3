"""Several engines behind the routes: the same answers, and every replica on the page and in
``/metrics``.
"""

from __future__ import annotations

import asyncio
import functools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from steppe.client import LocalText
from steppe.replicas.coordinator import DpCoordinator
from steppe.replicas.engine_core import EngineCoreActor
from steppe.replicas.messages import LocalEngineConfig
from steppe.replicas.runners.local import LocalRunner
from steppe.replicas.runners.scripted import Play, ScriptedRunner
from steppe.server.app import create_app
from steppe.stepping.cache_metrics import ContextCacheMetrics
from steppe.text.chat_template import ChatTemplate
from tests.replicas.engines import scripted
from tests.runtime.fakes import TEMPLATE, byte_tokenizer
from tests.server.support import Call, ask, chat, settle, text_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI

    from steppe.replicas.runner import ModelRunner

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def served(*runners: ModelRunner, **config: Any) -> AsyncIterator[tuple[FastAPI, Any]]:
    """An application over replicas that are ready."""
    text = LocalText(byte_tokenizer(), ChatTemplate(TEMPLATE), name="scripted")
    actors = [
        EngineCoreActor(runner, LocalEngineConfig(**config), text=text, name=f"r{number}")
        for number, runner in enumerate(runners)
    ]
    coordinator = DpCoordinator(actors, text=text)
    await coordinator.start()
    yield create_app(coordinator), coordinator
    await coordinator.drain(5.0)
    text.close()


def samples(call: Call) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(call.body.decode())
        for one in family.samples
    }


async def test_the_routes_answer_as_over_one_engine() -> None:
    async with served(LocalRunner(scripted), LocalRunner(scripted)) as (app, coordinator):
        calls = [Call(app, "/v1/chat/completions", chat(max_tokens=5)) for _ in range(4)]
        await asyncio.gather(*(call.task for call in calls))
        for call in calls:
            assert call.status == 200
            assert call.json["usage"]["completion_tokens"] == 5
        stream = await ask(app, "/v1/chat/completions", chat(max_tokens=5, stream=True, n=2))
        assert stream.events[-1] == "[DONE]"
        assert text_of(stream.events, 0)
        assert text_of(stream.events, 1)
        wrong = await ask(app, "/v1/completions", {"prompt": "x", "max_tokens": 4, "n": 500})
        assert wrong.status == 400
        shares = [one.submitted for one in coordinator.replicas()]
        assert sum(shares) == 5
        assert min(shares) >= 2
        assert (await ask(app, "/ready")).json["engine"] == "running"


async def test_every_replica_is_in_the_metrics_and_on_the_page() -> None:
    slow = functools.partial(scripted, step_seconds=0.002)
    async with served(LocalRunner(slow), ScriptedRunner(Play())) as (app, _):
        await ask(app, "/v1/engine/steps")
        for _ in range(4):
            await ask(app, "/v1/completions", {"prompt": "x", "max_tokens": 4})
        found = samples(await ask(app, "/metrics"))
        ended = [
            found["steppe_replica_requests_total", (("outcome", "completed"), ("replica", name))]
            for name in ("r0", "r1")
        ]
        assert sum(ended) == 4 == found["steppe_completed_total", ()]
        for name in ("r0", "r1"):
            assert found["steppe_replica_in_rotation", (("replica", name),)] == 1
            assert found["steppe_replica_in_flight", (("replica", name),)] == 0
            assert found["steppe_replica_starts_total", (("replica", name),)] == 1
        key = (("replica", "r1"), ("state", "ready"), ("transport", "local_cpu"))
        assert found["steppe_replica_state", key] == 1

        answer = (await ask(app, "/v1/engine/steps")).json
        assert [(one["name"], one["state"]) for one in answer["replicas"]] == [
            ("r0", "ready"), ("r1", "ready"),
        ]  # fmt: skip
        assert answer["seats"] == 16


async def test_caches_are_told_of_each_replica_and_of_all_together() -> None:
    first = ContextCacheMetrics(
        queried_tokens=100, reused_tokens=80, evicted_pages=3,
        cached_pages=5, leased_pages=2, total_pages=8,
    )  # fmt: skip
    second = ContextCacheMetrics(queried_tokens=300, cached_pages=1, leased_pages=1, total_pages=8)
    runners = [ScriptedRunner(cache=cache) for cache in (first, second, None)]
    async with served(*runners) as (app, coordinator):
        found = samples(await ask(app, "/metrics"))
        all_told = {
            "queried_tokens_total": 400, "reused_tokens_total": 80, "evicted_pages_total": 3,
            "cached_pages": 6, "hit_rate": 0.2, "occupancy": 3 / 16,
        }  # fmt: skip
        for name, value in all_told.items():
            assert found[f"steppe_cache_{name}", ()] == pytest.approx(value)
        of_each = {
            "hit_rate": (0.8, 0.0), "occupancy": (0.25, 0.125), "cached_pages": (5, 1),
            "evicted_pages_total": (3, 0), "reused_tokens_total": (80, 0), "total_pages": (8, 8),
        }  # fmt: skip
        for name, values in of_each.items():
            for replica, value in zip(("r0", "r1"), values, strict=True):
                key = (f"steppe_replica_cache_{name}", (("replica", replica),))
                assert found[key] == pytest.approx(value)
            assert (f"steppe_replica_cache_{name}", (("replica", "r2"),)) not in found
        for replica in ("r0", "r1", "r2"):
            assert found["steppe_replica_preemptions_total", (("replica", replica),)] == 0

        answer = (await ask(app, "/v1/engine/steps")).json
        assert answer["cache"]["hit_rate"] == pytest.approx(0.2)
        caches = [one["cache"] for one in answer["replicas"]]
        assert [one and one["hit_rate"] for one in caches] == [0.8, 0.0, None]
        assert caches[0]["evicted_pages"] == 3

        # What a replica that is gone has reused still counts; its pages are no more.
        await coordinator.deregister("r0")
        found = samples(await ask(app, "/metrics"))
        assert found["steppe_cache_reused_tokens_total", ()] == 80
        assert found["steppe_cache_cached_pages", ()] == 1


async def test_without_caches_nothing_is_told_of_them() -> None:
    async with served(ScriptedRunner(), ScriptedRunner()) as (app, _):
        assert b"cache_" not in (await ask(app, "/metrics")).body
        assert (await ask(app, "/v1/engine/steps")).json["cache"] is None


async def test_over_one_engine_there_are_no_replicas() -> None:
    text = await _page_of_one()
    assert "steppe_replica" not in text


async def _page_of_one() -> str:
    client = scripted()
    call = await ask(create_app(client), "/metrics")
    await client.drain(0.0)
    return call.body.decode()


async def test_a_client_that_leaves_ends_its_request_behind_a_coordinator() -> None:
    runner = ScriptedRunner(Play(ending="hang"))
    async with served(runner) as (app, coordinator):
        call = Call(app, "/v1/completions", {"prompt": "x", "stream": True})
        await settle()
        assert coordinator.account.live == 1
        call.disconnect()
        await settle()
        assert runner.seen[0].left
        assert runner.live == coordinator.account.live == 0


async def test_full_lost_and_unavailable_have_their_status() -> None:
    runner = ScriptedRunner(Play(ending="hang"))
    async with served(runner, max_concurrent=1, max_restarts=0) as (app, _):
        first = Call(app, "/v1/completions", {"prompt": "x", "stream": True})
        await settle()
        full = await ask(app, "/v1/completions", {"prompt": "x"})
        assert (full.status, full.error["code"]) == (429, "backlog_full")
        assert "retry-after" in full.headers
        runner.crash()
        await settle()
        assert first.done
        assert first.events[-2]["error"]["code"] == "replica_lost"
        gone = await ask(app, "/v1/completions", {"prompt": "x"})
        assert gone.status == 503
        assert (await ask(app, "/ready")).status == 503
        assert (await ask(app, "/health")).status == 503
