"""P31: an empty prompt is a BOS where the tokenizer has one, and else refused."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import processors

from steppe.text.tokenizer import Tokenizer
from tests.runtime.fakes import EOS, IM_START, byte_core
from tests.server.support import staged

pytestmark = pytest.mark.anyio


def with_bos() -> Tokenizer:
    core = byte_core()
    core.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", IM_START)]
    )
    return Tokenizer(core, bos_id=IM_START, eos_id=EOS)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("prompt", "bare", "bos"),
    [
        ("", 400, 200),
        ([""], 400, 200),
        (["a", ""], 400, 200),
        ([], 400, 400),
        ([[]], 400, 400),
        ([[1], []], 400, 400),
        ("  \n", 200, 200),
    ],
)
async def test_empty_prompts(prompt: Any, bare: int, bos: int, stream: bool) -> None:
    for status, how in ((bare, {}), (bos, {"tokenizer": with_bos()})):
        async with staged(**how) as stage:
            body = {"prompt": prompt, "max_tokens": 3, "stream": stream}
            call = await stage.ask("/v1/completions", body)
            assert call.status == status
            if status == 400:
                assert call.error["param"] == "prompt"
                assert stage.engine.pending == 0
            assert all(tokens > 0 for tokens in stage.runtime.prompt_tokens.values())
            assert (await stage.ask("/v1/completions", {"prompt": "a"})).status == 200


async def test_a_message_may_be_empty() -> None:
    async with staged() as stage:
        body = {"messages": [{"role": "user", "content": ""}], "max_tokens": 2}
        assert (await stage.ask("/v1/chat/completions", body)).status == 200
