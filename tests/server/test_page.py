"""The live page: what is served, and that it needs nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from steppe.server.routes.page import FILES
from steppe.server.settings import ServerSettings
from tests.server.support import staged

pytestmark = pytest.mark.anyio

PAGE = files("steppe.server").joinpath("page")
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class Elements(HTMLParser):
    """Every element of a document with its attributes, and the text within scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style"):
            self.inline += data.strip()


def elements() -> Elements:
    return Elements(PAGE.joinpath("index.html").read_text("utf-8"))


@pytest.mark.parametrize("path", FILES)
async def test_every_file_is_served_with_its_type_and_without_a_key(path: str) -> None:
    async with staged(settings=ServerSettings(api_keys=("secret",))) as stage:
        call = await stage.ask(path)
        name = "index.html" if path == "/" else path.removeprefix("/page/")
        assert call.status == 200
        assert call.body == PAGE.joinpath(name).read_bytes()
        assert call.headers["content-type"].split(";")[0] == TYPES[name.rpartition(".")[2]]
        assert call.headers["x-content-type-options"] == "nosniff"
        policy = dict(
            part.strip().partition(" ")[::2]
            for part in call.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in call.headers["content-security-policy"]
        head = await stage.ask(path, method="HEAD")
        assert (head.status, head.headers["content-length"]) == (200, str(len(call.body)))


async def test_nothing_else_of_the_folder_is_served() -> None:
    async with staged() as stage:
        for path in ("/page/", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py"):
            assert (await stage.ask(path)).status == 404


async def test_every_file_of_the_folder_is_served() -> None:
    assert {name for name, _ in FILES.values()} == {one.name for one in PAGE.iterdir()}


async def test_the_page_refers_to_its_own_files_only() -> None:
    links = [
        attributes[name]
        for _, attributes in elements().found
        for name in ("src", "href", "action", "formaction", "data", "poster", "srcset")
        if attributes.get(name) is not None
    ]
    assert set(links) == {path.removeprefix("/") for path in FILES if path != "/"}


async def test_no_file_names_another_place() -> None:
    for path in PAGE.iterdir():
        text = path.read_text("utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"\w+:(?://|\\/\\/)|[\"'(`]//|@import|url\(", text), path.name


async def test_nothing_in_the_page_needs_a_laxer_policy() -> None:
    page = elements()
    assert page.inline == ""
    for tag, attributes in page.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        assert not (attributes.get("href") or "").startswith(("javascript:", "data:"))
    script = PAGE.joinpath("app.js").read_text("utf-8")
    assert not re.search(
        r"\beval\b|new Function|innerHTML|outerHTML|document\.write|insertAdj", script
    )


async def test_the_script_finds_every_element_it_asks_for() -> None:
    ids = [attributes["id"] for _, attributes in elements().found if "id" in attributes]
    assert len(ids) == len(set(ids))
    script = PAGE.joinpath("app.js").read_text("utf-8")
    asked = set(re.findall(r'byId\("([\w-]+)"\)', script))
    asked |= {
        name for pair in re.findall(r'drawPlot\("([\w-]+)", "([\w-]+)"', script) for name in pair
    }
    assert asked <= set(ids)


async def test_every_input_has_a_name_that_is_read_out() -> None:
    document = PAGE.joinpath("index.html").read_text("utf-8")
    within_labels = "".join(re.findall(r"<label.*?</label>", document, re.DOTALL))
    within = [dict(attributes) for _, attributes in Elements(within_labels).found]
    for tag, attributes in elements().found:
        if tag in ("input", "textarea"):
            named = "aria-label" in attributes or f'for="{attributes.get("id")}"' in document
            assert named or attributes in within, attributes


async def test_the_script_calls_what_the_server_has() -> None:
    script = PAGE.joinpath("app.js").read_text("utf-8")
    paths = {"/" + path for path in re.findall(r"[\"'`](v1/[\w/]+?)/?[\"'`?$]", script)}
    assert {"/v1/engine/steps", "/v1/chat/completions", "/v1/engine/requests"} <= paths
    async with staged() as stage:
        routes = {path.partition("/{")[0] for path in stage.app.openapi()["paths"]}
    assert paths <= routes
