"""P30: a bias that names no token is refused by name, and nobody else notices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from steppe.client import LocalClient
from steppe.server.app import create_app
from tests.server.support import ask, fake_llm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

BAD: list[Any] = [
    {"191222": -100},
    {"259": 1},
    {"AI": -100},
    {"-1": 1},
    {"1.5": 1},
    {" 7": 1},
    {"\u0661": 1},
    {"": 1},
    {"9" * 30: 1},
    {"65": 1e308},
    {"65": "x"},
    {"65": None},
    {str(i): 1 for i in range(100_000)},
    [[65, 1]],
    "65",
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_bad_biases_are_refused_beside_a_good_request(path: str, tmp_path: Path) -> None:
    prompt: dict[str, Any] = {"prompt": "hello"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "hello"}]}
    good = {**prompt, "max_tokens": 20, "logit_bias": {"65": 5.0, "66": -100}}
    with fake_llm(tmp_path) as llm:
        app = create_app(LocalClient.of(llm))

        def answer(data: Any) -> Any:
            return data["choices"][0].get("text") or data["choices"][0]["message"]["content"]

        alone = answer((await ask(app, path, good)).json)
        for bias in BAD:
            call = await ask(app, path, {**prompt, "max_tokens": 5, "logit_bias": bias})
            assert call.status == 400, bias
            assert call.error["param"].startswith("logit_bias")
            assert answer((await ask(app, path, good)).json) == alone
