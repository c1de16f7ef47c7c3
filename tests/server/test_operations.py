"""Health, readiness, metrics, and the model's tokenizer over HTTP."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from steppe import ShutdownMode
from steppe.errors import ExecutionLostError
from steppe.testing import Script
from tests.server.support import Stage, chat, settle, staged

pytestmark = pytest.mark.anyio


async def samples(stage: Stage) -> dict[str, float]:
    page = (await stage.ask("/metrics")).body.decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.labels
    }


async def test_metrics_say_what_the_engine_does() -> None:
    async with staged(max_batch_size=1) as stage:
        before = await samples(stage)
        assert before["steppe_resident"] == before["steppe_queued"] == 0
        calls = [
            stage.call("/v1/chat/completions", chat(stream=True, max_tokens=4)) for _ in range(3)
        ]
        await stage.step()
        during = await samples(stage)
        assert during["steppe_resident"] == 1
        assert during["steppe_queued"] == 2
        assert during["steppe_submitted_total"] == 3
        for call in calls:
            await stage.run(call)
        after = await samples(stage)
        assert after["steppe_completed_total"] == 3
        assert after["steppe_tokens_total"] == 12
        assert after["steppe_queue_latency_seconds_count"] == 3
        assert after["steppe_time_to_first_token_seconds_count"] == 3
        assert after["steppe_inter_token_seconds_count"] == 9
        assert after["steppe_request_seconds_count"] == 3
        assert after["steppe_resident"] == after["steppe_queued"] == 0
        # Every step since the first look, once: three prompts, and three more tokens for each.
        steps = stage.runtime.steps
        assert after["steppe_step_seconds_count"] == steps
        assert after["steppe_step_decodes_sum"] == 9
        prompts = sum(stage.runtime.prompt_tokens.values())
        assert after["steppe_step_prompt_tokens_sum"] == prompts
        again = await samples(stage)
        assert again["steppe_step_seconds_count"] == steps


async def test_metrics_say_how_full_the_cache_is() -> None:
    script = Script(pages=50, page_size=16)
    async with staged(script=script) as stage:
        before = await samples(stage)
        assert before["steppe_cache_tokens"] == 800
        assert before["steppe_cache_used_tokens"] == 0
        body = {"prompt": [65] * 100, "max_tokens": 60}  # 10 pages, held from the start
        call = stage.call("/v1/completions", body)
        await stage.step(3)
        assert (await samples(stage))["steppe_cache_used_tokens"] == 160
        call.disconnect()
        await stage.step()
        assert (await samples(stage))["steppe_cache_used_tokens"] == 0


async def test_health_is_one_thing_and_readiness_another() -> None:
    async with staged() as stage:
        for path in ("/health", "/ready"):
            assert (await stage.ask(path)).json["status"] == "ok"
        stage.engine._shared.close_admission()
        assert (await stage.ask("/health")).status == 200
        call = await stage.ask("/ready")
        assert (call.status, call.json["engine"]) == (503, "stopping")
        stage.engine.shutdown(ShutdownMode.CANCEL)
        assert (await stage.ask("/health")).status == 503


async def test_a_dead_engine_is_neither() -> None:
    stage = Stage(script=Script(fail_steps={1: ExecutionLostError("no device")}))
    call = stage.call("/v1/chat/completions", chat())
    await stage.run(call)
    assert (call.status, call.error["code"]) == (500, "generation_failed")
    for path in ("/health", "/ready"):
        answer = await stage.ask(path)
        assert answer.status == 503
        assert "no device" in answer.json["cause"]
    again = await stage.ask("/v1/chat/completions", chat())
    assert (again.status, again.error["code"]) == (503, "engine_failed")
    assert "no device" in again.error["message"]
    stage.engine.shutdown(ShutdownMode.CANCEL)


async def test_a_text_and_its_tokens() -> None:
    async with staged() as stage:
        call = await stage.ask("/tokenize", {"prompt": "héllo <|end|>", "return_token_strs": True})
        ids = call.json["tokens"]
        assert call.json["count"] == len(ids)
        assert ids == list("héllo <|end|>".encode())
        assert call.json["token_strs"][0] == "h"
        back = await stage.ask("/detokenize", {"tokens": ids})
        assert back.json == {"prompt": "héllo <|end|>"}
        special = await stage.ask("/tokenize", {"prompt": "<|end|>", "parse_special": True})
        assert special.json["count"] == 1
        hidden = await stage.ask(
            "/detokenize", {"tokens": special.json["tokens"], "skip_special_tokens": True}
        )
        assert hidden.json == {"prompt": ""}
        long = await stage.ask("/tokenize", {"prompt": "x" * 20000})
        assert long.json["count"] == 20000


async def test_a_conversation_and_its_tokens() -> None:
    async with staged() as stage:
        body = {"messages": chat("hi")["messages"]}
        with_prompt = (await stage.ask("/tokenize", body)).json["tokens"]
        body["add_generation_prompt"] = False
        without = (await stage.ask("/tokenize", body)).json["tokens"]
        assert with_prompt[: len(without)] == without
        text = (await stage.ask("/detokenize", {"tokens": with_prompt})).json["prompt"]
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized(path: str, body: object, param: str) -> None:
    async with staged() as stage:
        call = await stage.ask(path, body)
        assert (call.status, call.error["param"]) == (400, param)


async def test_the_document_needs_nothing_from_elsewhere() -> None:
    async with staged() as stage:
        call = await stage.ask("/openapi.json")
        assert "/v1/chat/completions" in call.json["paths"]
        assert (await stage.ask("/docs")).status == 404
        await settle()
