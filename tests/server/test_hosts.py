"""A server answers to its own names: a page that points another one here gets nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from steppe.errors import ConfigError
from steppe.server.errors import ProblemError
from steppe.server.hosts import Hosts, is_name
from steppe.server.settings import ServerSettings
from tests.server.support import chat, staged

pytestmark = pytest.mark.anyio


def answers(host: str | None, *allowed: str) -> bool:
    """Whether a server with these names answers to that one."""
    try:
        Hosts(allowed).check(Headers({} if host is None else {"host": host}))
    except ProblemError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        None,
        "localhost",
        "localhost:8000",
        "LocalHost.:80",
        "llm.localhost:8000",
        "127.0.0.1:8000",
        "192.168.1.7",
        "[::1]:8000",
        "[fe80::1]",
        "mine.example",
        "MINE.example.:8000",
    ],
)
def test_a_server_answers_to_its_own_names(host: str | None) -> None:
    assert answers(host, "Mine.example")


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example:localhost",
        "localhost:8000.evil.example",
        "[::1].evil.example",
        "[evil.example]",
        "evil.example@localhost",
        "notlocalhost",
        "mine.example.evil.example",
        "1.2.3",
    ],
)
def test_and_to_no_other(host: str) -> None:
    assert not answers(host, "mine.example")
    assert answers(host, "*")


@given(st.text(st.characters(max_codepoint=255), max_size=40))
def test_whatever_is_sent_is_a_name_or_refused(text: str) -> None:
    assert answers(text, "*")
    if answers(text, "mine.example"):
        assert set(text.lower()) <= set("abcdefghijklmnopqrstuvwxyz0123456789-._~:[]") or (
            text.lower().rpartition(":")[0] or text.lower()
        ).rstrip(".").endswith(".localhost")


def test_several_are_none() -> None:
    headers = Headers(raw=[(b"host", b"localhost"), (b"host", b"evil.example")])
    with pytest.raises(ProblemError):
        Hosts().check(headers)


async def test_nothing_is_done_for_another_name() -> None:
    async with staged(settings=ServerSettings(allowed_hosts=("mine.example",))) as stage:
        for path in ("/", "/health", "/v1/chat/completions", "/v1/models", "/api/tags"):
            call = await stage.ask(path, chat(), headers={"host": "evil.example"})
            assert call.status == 421
            assert path.startswith("/api") or call.error["code"] == "unknown_host"
            assert "--allowed-host" in call.body.decode()
        assert stage.runtime.steps == 0
        assert (await stage.ask("/health", headers={"host": "mine.example"})).status == 200


@pytest.mark.parametrize("name", ["", "a:80", "http://a", "a b", "*.a", "é"])
def test_a_name_is_a_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(allowed_hosts=(name,))
    assert caught.value.field == "allowed_hosts"
    assert not is_name(name)
    assert not is_name("0.0.0.0")
    assert is_name("here.example")
