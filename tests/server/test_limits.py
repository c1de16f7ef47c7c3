"""Keys, labels, body limits, web origins: what is decided before a route is asked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from steppe.errors import ConfigError
from steppe.server.limits import MAX_LABEL, KeyRing, request_label
from steppe.server.settings import ServerSettings
from tests.server.support import Call, chat, settle, staged

pytestmark = pytest.mark.anyio


async def test_without_a_key_nothing_is_done() -> None:
    settings = ServerSettings(api_keys=("first", "second"))
    async with staged(settings=settings) as stage:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer"},
            {"authorization": "Basic first"},
            {"authorization": "first"},
            {"x-api-key": "secon"},
            {"authorization": "Bearer \xff"},
        ):
            for path in ("/v1/chat/completions", "/v1/nothing", "/metrics", "/openapi.json"):
                call = await stage.ask(path, chat(max_tokens=1), headers=headers)
                assert (call.status, call.error["code"]) == (401, "invalid_api_key")
                assert call.headers["www-authenticate"] == "Bearer"
        assert stage.runtime.steps == 0
        for headers in (
            {"authorization": "Bearer first"},
            {"authorization": "bearer second"},
            {"x-api-key": "second"},
        ):
            call = await stage.ask("/v1/chat/completions", chat(max_tokens=1), headers=headers)
            assert call.status == 200
        # What a load balancer asks.
        assert (await stage.ask("/health")).status == 200
        assert (await stage.ask("/ready")).status == 200


@given(st.text(min_size=1, max_size=30), st.lists(st.text("abc", min_size=1), max_size=4))
async def test_only_a_whole_key_opens(asked: str, keys: list[str]) -> None:
    headers = Headers(raw=[(b"x-api-key", asked.encode("utf-8", "replace"))])
    given_key = headers["x-api-key"]
    caller = KeyRing(tuple(keys)).caller(headers)
    assert (caller is not None) == (not keys or given_key in keys)


def test_a_caller_is_known_again_by_a_name_that_is_no_key() -> None:
    def caller(ring: KeyRing, key: str, header: str = "x-api-key") -> str | None:
        return ring.caller(Headers({header: key}))

    ring, restarted = KeyRing(("first", "second")), KeyRing(("second", "first"))
    one, other = caller(ring, "first"), caller(ring, "second")
    assert one != other
    assert one == caller(restarted, "first") == caller(ring, "Bearer first", "authorization")
    assert one is not None
    assert "first" not in one
    assert caller(KeyRing(()), "first") == ""


async def test_a_label_is_echoed_and_a_missing_one_is_made() -> None:
    async with staged() as stage:
        call = await stage.ask("/health", headers={"x-request-id": "mine-7"})
        assert call.headers["x-request-id"] == "mine-7"
        call = await stage.ask("/v1/nothing")
        assert call.headers["x-request-id"].startswith("req-")


@given(st.text(st.characters(max_codepoint=255), max_size=1000))
async def test_a_label_is_short_and_visible(text: str) -> None:
    label = request_label(Headers(raw=[(b"x-request-id", text.encode("latin-1"))]))
    assert 1 <= len(label) <= MAX_LABEL
    assert all("!" <= char <= "~" for char in label)
    wanted = "".join(char for char in text[: 4 * MAX_LABEL] if "!" <= char <= "~")[:MAX_LABEL]
    assert label == wanted or not wanted


async def test_each_request_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with staged() as stage:
        await stage.ask("/health", headers={"x-request-id": "quiet"})
        with caplog.at_level("INFO", logger="steppe.server.access"):
            await stage.ask("/v1/nothing\nhere", {}, headers={"x-request-id": "loud"})
    (line,) = [one.getMessage() for one in caplog.records if one.name.endswith("access")]
    assert line.startswith("POST '/v1/nothing\\nhere' 404 ")
    assert line.endswith("s loud")


async def test_a_body_is_bounded_whether_it_says_its_length_or_not() -> None:
    async with staged(settings=ServerSettings(max_body_bytes=100)) as stage:
        small = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        exact = small + b" " * (100 - len(small))
        assert (await stage.ask("/v1/completions", exact)).status == 200
        for headers in ({}, {"content-length": "101"}, {"content-length": "9" * 400}):
            call = await stage.ask("/v1/completions", exact + b" ", headers=headers)
            assert (call.status, call.error["code"]) == (413, "body_too_large")
            assert call.headers["connection"] == "close"


async def test_a_body_must_arrive_in_time() -> None:
    async with staged(settings=ServerSettings(body_timeout=0.02)) as stage:
        call = stage.call("/v1/completions", {"prompt": "a"})
        call._incoming.get_nowait()
        call._incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        await asyncio.wait_for(asyncio.shield(call.task), 10)
        assert (call.status, call.error["code"]) == (408, "body_timeout")


async def test_a_client_that_leaves_in_its_body_is_forgotten() -> None:
    async with staged() as stage:
        call = stage.call("/v1/completions", {"prompt": "a"})
        call._incoming.get_nowait()
        call._incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        call.disconnect()
        await settle()
        assert call.done
        assert call.messages == []


async def test_a_prompt_may_be_limited_below_the_context() -> None:
    async with staged(settings=ServerSettings(max_prompt_tokens=30)) as stage:
        for path, body, param in (
            ("/v1/completions", {"prompt": "x" * 31}, "prompt"),
            ("/v1/completions", {"prompt": list(range(31))}, "prompt"),
            ("/v1/chat/completions", chat("x" * 31), "messages"),
        ):
            call = await stage.ask(path, body)
            assert (call.status, call.error["param"]) == (400, param)
            assert call.error["code"] == "context_length_exceeded"
            assert "30" in call.error["message"]
        assert stage.runtime.steps == 0
        assert (await stage.ask("/v1/completions", {"prompt": "x" * 30})).status == 200


def preflight(origin: str) -> dict[str, Any]:
    return {
        "method": "OPTIONS",
        "headers": {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type,authorization",
        },
    }


async def test_no_web_page_may_ask_unless_its_origin_is_named() -> None:
    async with staged() as stage:
        call = await stage.ask("/v1/chat/completions", **preflight("http://evil.example"))
        assert call.status == 405
        assert not any(name.startswith("access-control") for name in call.headers)
    settings = ServerSettings(cors_origins=("http://good.example",), api_keys=("key",))
    async with staged(settings=settings) as stage:
        call = await stage.ask("/v1/chat/completions", **preflight("http://good.example"))
        assert call.status == 200
        assert call.headers["access-control-allow-origin"] == "http://good.example"
        call = await stage.ask("/v1/chat/completions", **preflight("http://evil.example"))
        assert "access-control-allow-origin" not in call.headers
        # A refusal can be read by the page as well.
        call = await stage.ask(
            "/v1/chat/completions", chat(), headers={"origin": "http://good.example"}
        )
        assert call.status == 401
        assert call.headers["access-control-allow-origin"] == "http://good.example"


async def test_other_scopes_pass_untouched() -> None:
    async with staged() as stage:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "lifespan.startup"} if not sent else {"type": "lifespan.shutdown"}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await stage.app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_body_bytes": 0},
        {"max_prompt_tokens": 0},
        {"write_timeout": 0.0},
        {"body_timeout": float("nan")},
        {"queue_timeout": -1.0},
        {"request_timeout": float("inf")},
        {"drain_timeout": -0.1},
        {"api_keys": ("",)},
        {"api_keys": ("schlüssel",)},
        {"served_names": ("",)},
    ],
)
async def test_a_wrong_setting_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(**wrong)
    assert caught.value.field in wrong


async def test_names_that_are_served_are_the_ones_that_work() -> None:
    settings = ServerSettings(served_names=("gpt-x", "default"))
    async with staged(settings=settings) as stage:

        async def asked(**model: str) -> Call:
            return await stage.ask("/v1/completions", {"prompt": "a", "max_tokens": 1, **model})

        assert (await asked(model="gpt-x")).json["model"] == "gpt-x"
        assert (await asked(model="default")).json["model"] == "default"
        assert (await asked()).json["model"] == "gpt-x"
        assert (await asked(model="scripted")).status == 404
        listed = (await stage.ask("/v1/models")).json["data"]
        assert [model["id"] for model in listed] == ["gpt-x", "default"]
