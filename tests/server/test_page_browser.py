"""The page in a real browser: a chat, a seat that appears, a request cancelled by its button.

Needs a Chromium: Debian's ``chromium`` is enough, ``STEPPE_BROWSER`` names any other. Without one
the test is skipped and says so; ``STEPPE_SCREENSHOTS`` is a folder to keep its pictures in.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from steppe import LLM
from steppe.client import LocalClient
from steppe.server.app import create_app
from steppe.server.lifecycle import bind, server_for
from steppe.server.settings import ServerSettings
from steppe.testing import assert_idle_clean
from tests.server.browser import Browser, find_browser
from tests.server.served import SlowBackend
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on this machine: install one, or name it in STEPPE_BROWSER")
    # A profile that pytest would keep is some ten megabytes of nothing.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        Browser(program, Path(profile)) as browser,
    ):
        yield browser


@contextmanager
def serving(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: ServerSettings
) -> Iterator[tuple[str, LLM]]:
    """A server whose steps take long enough to be watched."""
    monkeypatch.setattr("steppe.llm.create_backend", lambda *_, **__: SlowBackend())
    model = write_tiny_model(folder / "tiny", temperature=0.0)
    with bind("127.0.0.1", 0) as sock, LLM(model, max_batch_size=2) as llm:
        client = LocalClient.of(llm)
        server = server_for(create_app(client, settings), client, drain_timeout=5.0)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/", llm
            assert_idle_clean(llm.engine)
        finally:
            server.should_exit = True
            thread.join()


def answer(browser: Browser, number: int) -> str:
    """The text of the number-th answer so far."""
    text = browser.evaluate(
        f"document.querySelectorAll('.message.assistant .text')[{number}]?.textContent ?? ''"
    )
    assert isinstance(text, str)
    return text


def test_the_page_at_work(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shots = Path(os.environ.get("STEPPE_SCREENSHOTS", tmp_path))
    with serving(tmp_path, monkeypatch, ServerSettings()) as (url, llm):
        browser.show(1280, 860)
        browser.open(url)
        browser.wait("document.querySelector('#state').textContent == 'running'")
        assert browser.evaluate("document.querySelector('#model').textContent") == llm.name

        # A chat, whole.
        browser.evaluate("document.querySelector('[data-field=max_tokens]').value = 12")
        browser.type("#prompt", "hello")
        browser.click("#send")
        browser.wait("document.querySelector('.message.assistant .note').textContent")
        assert answer(browser, 0)
        note = browser.evaluate("document.querySelector('.message.assistant .note').textContent")
        assert note.startswith("12 tokens")

        # A long one takes a seat; its button ends it.
        browser.evaluate("document.querySelector('[data-field=max_tokens]').value = 180")
        browser.type("#prompt", "more")
        browser.click("#send")
        browser.wait("document.querySelectorAll('#seats li').length == 1")
        browser.wait("engine.columns.length > 3")
        for name, width, height, dark, phone in (
            ("desktop-light", 1280, 860, False, False),
            ("desktop-dark", 1280, 860, True, False),
            ("phone-light", 390, 844, False, True),
        ):
            browser.show(width, height, dark=dark, phone=phone)
            browser.evaluate("new Promise((done) => setTimeout(done, 100))")
            browser.screenshot(shots / f"{name}.png")
            assert (shots / f"{name}.png").read_bytes().startswith(PNG)
            assert browser.evaluate("document.documentElement.scrollWidth") == width
        browser.show(1280, 860)
        browser.click("#seats li button")
        browser.wait("document.querySelectorAll('.message.assistant .note')[1].textContent")
        note = browser.evaluate(
            "document.querySelectorAll('.message.assistant .note')[1].textContent"
        )
        assert "cancelled" in note
        browser.wait("document.querySelectorAll('#seats li').length == 0")

        # The stop button, from the other side. A new chat: the model's memory is short.
        browser.click("#clear")
        browser.type("#prompt", "again")
        browser.click("#send")
        browser.wait("document.querySelectorAll('#seats li').length == 1")
        browser.click("#stop")
        browser.wait("document.querySelectorAll('#seats li').length == 0")
        browser.wait("!document.querySelector('#send').disabled")
        assert llm.engine.metrics().cancelled == 2
    assert browser.complaints == []


def test_what_models_and_clients_say_is_text_and_nothing_else(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch, ServerSettings()) as (url, _):
        browser.open(url)
        browser.evaluate("document.querySelector('[data-field=max_tokens]').value = 2")
        browser.type("#prompt", "<img src=x onerror=document.title='gone'>")
        browser.click("#send")
        browser.wait("document.querySelector('.message.assistant .note').textContent")
        shown = browser.evaluate("document.querySelector('.message.user .text').textContent")
        assert shown == "<img src=x onerror=document.title='gone'>"
        assert browser.evaluate("document.querySelectorAll('#messages img').length") == 0
    assert browser.complaints == []


def test_the_page_asks_for_a_key(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch, ServerSettings(api_keys=("secret",))) as (url, _):
        browser.open(url)
        browser.wait("!document.querySelector('#key-form').hidden")
        browser.type("#key", "secret")
        browser.click("#key-form button")
        browser.wait("document.querySelector('#state').textContent == 'running'")
        assert browser.evaluate("document.querySelector('#key-form').hidden")
        assert browser.evaluate("document.querySelector('#key').value") == ""
