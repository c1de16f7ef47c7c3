"""A server whose model says what the test wants said, one byte in each step."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import openai

from steppe import EngineConfig, RequestEngine, ShutdownMode
from steppe.client import LocalClient, ModelCard
from steppe.runtime.artifacts import ModelArtifacts
from steppe.runtime.config import RuntimeConfig
from steppe.runtime.inference_runtime import LLMInferenceRuntime
from steppe.runtime.rank_runtime import LLMRankRuntime
from steppe.server.app import create_app
from steppe.server.lifecycle import bind, server_for
from steppe.testing import assert_idle_clean
from steppe.text.chat_template import ChatTemplate
from steppe.text.reasoning.families import reasoning_format
from steppe.text.tokenizer import Tokenizer
from steppe.text.tools.families import tool_format
from tests.runtime.fakes import EOS, IM_END, IM_START, FakeBackend, FakeProgram, byte_core

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from steppe.backends.base import StepInput

PYTHON_TAG = 259
VOCAB = 260
HEADER = b"assistant\n"

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
BEGIN = "<|im_start|>assistant\n"
TEMPLATES = {
    "plain": TURNS + BEGIN,
    "qwen3": "{# <tool_call> #}{% set end = '</think>' %}"
    + TURNS
    + BEGIN
    # As Qwen 3 does: reasoning that is switched off is opened and closed for the model.
    + "{% if enable_thinking is defined and not enable_thinking %}"
    + "<think>\n\n</think>\n\n{% endif %}",
    # Knows the marks of others' reasoning, and its model has none of its own.
    "instruct": "{% set end = '</think>' %}" + TURNS + BEGIN,
    "deepseek": "{% set end = '</think>' %}" + TURNS + BEGIN + "<think>\n",
    "llama3": '{# <|python_tag|> #}{# <|start_header_id|> "parameters" #}' + TURNS + BEGIN,
}


@cache
def speaking_tokenizer() -> Tokenizer:
    """Bytes, and the control tokens of the fakes and of Llama 3."""
    core = byte_core()
    core.add_special_tokens(["<|python_tag|>"])
    return Tokenizer(core, eos_id=EOS, stop_ids=[IM_END])


class SpeakingBackend(FakeBackend):
    """Says ``speech`` in answer to every conversation, then ends.

    ``opened`` is what the template puts behind the assistant's header. A prompt without a header
    is continued as the fake backend does. A guide may forbid the next byte of the speech: whatever
    it allows is said then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.speech: Sequence[int] = ()
        self.opened = b""
        self.held_at = -1
        self.go_on = threading.Event()

    def hold(self, at: int) -> threading.Event:
        """Once, stop before the token ``at`` of the speech until the event is set."""
        self.held_at = at
        self.go_on.clear()
        return self.go_on

    def say(self, text: str, opened: str = "") -> None:
        """Say this from now on. ``<|python_tag|>`` is its control token."""
        self.speech = speaking_tokenizer().encode(
            text, add_special_tokens=False, parse_special=True
        )
        self.opened = opened.encode()

    def _logits(self, step: StepInput, row: int) -> np.ndarray:
        logits = super()._logits(step, row)
        sequence = int(step.query_start.searchsorted(row, side="right")) - 1
        table, memory = step.block_tables[0][sequence], self._memory[0]
        ids = [
            int(memory[table[at // self.page_size] * self.page_size + at % self.page_size])
            for at in range(int(step.positions[0, row]) + 1)
        ]
        if IM_START in ids:
            start = len(ids) - ids[::-1].index(IM_START)
            said = len(ids) - start - len(HEADER) - len(self.opened)
            if said == self.held_at:
                self.held_at = -1
                assert self.go_on.wait(30), "nobody read what was said before"
            logits[self.speech[said] if said < len(self.speech) else IM_END] += 1000
        return logits


@dataclass
class Speaker:
    """A server that listens, and the model behind it."""

    url: str
    backend: SpeakingBackend
    client: openai.OpenAI

    def chat(self, **fields: Any) -> Any:
        """A chat completion, and the same one streamed and put together again, which is equal."""
        ask: dict[str, Any] = {
            "model": "speaker",
            "messages": [{"role": "user", "content": "speak"}],
            "temperature": 0,
            **fields,
        }
        whole = self.client.chat.completions.create(**ask)
        chunks = list(self.client.chat.completions.create(**ask, stream=True))
        streamed: dict[int, dict[str, Any]] = {}
        for chunk in chunks:
            for choice in chunk.choices:
                one = streamed.setdefault(
                    choice.index, {"content": "", "reasoning": "", "calls": [], "ends": []}
                )
                delta: Any = choice.delta
                one["content"] += delta.content or ""
                one["reasoning"] += getattr(delta, "reasoning_content", None) or ""
                for call in delta.tool_calls or ():
                    if call.function.name:
                        assert call.index == len(one["calls"])
                        assert call.type == "function"
                        assert call.id
                        one["calls"].append((call.function.name, ""))
                    assert call.index == len(one["calls"]) - 1
                    name, arguments = one["calls"].pop()
                    one["calls"].append((name, arguments + call.function.arguments))
                if choice.finish_reason is not None:
                    one["ends"].append(choice.finish_reason)
        for choice in whole.choices:
            message: Any = choice.message
            assert streamed.pop(choice.index) == {
                "content": message.content or "",
                "reasoning": getattr(message, "reasoning_content", None) or "",
                "calls": [
                    (c.function.name, c.function.arguments) for c in message.tool_calls or ()
                ],
                "ends": [choice.finish_reason],
            }
        assert not streamed
        return whole


@contextmanager
def speaker(family: str) -> Iterator[Speaker]:
    """A server with the chat template of ``family``. In the end its engine must hold nothing."""
    backend = SpeakingBackend()
    template = ChatTemplate(TEMPLATES[family] + "{{ '' }}")  # a last line break would be cut off
    artifacts = ModelArtifacts(
        name="speaker",
        program=FakeProgram(vocab_size=VOCAB, max_positions=2000, groups=1),
        tokenizer=speaking_tokenizer(),
        chat_template=template,
        stop_token_ids=frozenset({EOS, IM_END}),
        generation_defaults={},
    )
    rank = LLMRankRuntime(
        artifacts=artifacts,
        backend=backend,
        config=RuntimeConfig(max_batch_size=8, kv_memory=1000 * 8 * 8),
    )
    engine = RequestEngine(
        LLMInferenceRuntime(rank), EngineConfig(max_batch_size=8, max_pending_requests=32)
    )
    card = ModelCard(
        name="speaker",
        context_length=2000,
        vocab_size=VOCAB,
        max_batch_size=8,
        max_pending=32,
        has_chat_template=True,
        reasoning=reasoning_format(template.sources),
        tools=tool_format(template.sources),
    )
    local = LocalClient(engine, tokenizer=artifacts.tokenizer, card=card, chat_template=template)
    with bind("127.0.0.1", 0) as sock:
        server = server_for(create_app(local), local, drain_timeout=5.0)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        while not server.started:
            time.sleep(0.002)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield Speaker(url, backend, client)
        assert_idle_clean(engine)
        server.should_exit = True
        thread.join()
    engine.shutdown(ShutdownMode.CANCEL)
