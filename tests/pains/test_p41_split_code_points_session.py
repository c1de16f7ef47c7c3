"""P41: a character cut between two tokens became U+FFFD. Here through the session: in chunks, in
the final text, after a preemption, and when the limit cuts the last character.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.runtime.rank_runtime import LLMRankRuntime
from steppe.runtime.stepped.request import SteppedRequest
from steppe.stepping.types import (
    DecodeEntry,
    ImmutablePrefillBatch,
    ImmutableStepBatch,
    PrefillEntry,
)
from steppe.streaming import StreamChannel
from tests.runtime.asking import ask
from tests.runtime.fakes import VOCAB, FakeBackend, assert_clean, fake_artifacts

if TYPE_CHECKING:
    from steppe.backends.base import StepInput

TEXTS = ("😊", "你好，世界", "👩‍👩‍👧‍👦 family", "🇺🇸 e\u0301 Z̷͓̈", "日本語 😀😀", "Ω≈ç√∫")
PROMPT = "say: "


class Speaker(FakeBackend):
    """A model that spells one text, byte by byte, after a prompt of known length."""

    def __init__(self, spelled: bytes, prompt: int = len(PROMPT)) -> None:
        super().__init__()
        self.spelled = spelled
        self.prompt = prompt

    def _logits(self, step: StepInput, row: int) -> np.ndarray:
        super()._logits(step, row)  # the cache must still be right
        logits = np.zeros(VOCAB, np.float32)
        logits[self.spelled[int(step.positions[0, row]) + 1 - self.prompt]] = 1.0
        return logits


def speaker(spelled: bytes, prompt: int = len(PROMPT)) -> LLMRankRuntime:
    artifacts = fake_artifacts(max_positions=600)
    return LLMRankRuntime(artifacts=artifacts, backend=Speaker(spelled, prompt))


@pytest.mark.parametrize("text", TEXTS)
def test_characters_arrive_whole_chunk_by_chunk(text: str) -> None:
    spelled = text.encode()
    runtime = speaker(spelled)
    channel = StreamChannel()
    pieces: list[str] = []

    def read(_: object) -> None:
        chunk = channel.try_pop()
        if chunk is not None:
            pieces.append(chunk.text)

    request = ask(PROMPT, len(spelled), channel=channel)
    response = runtime.handle_request(request, boundary_hook=read)
    read(None)
    assert response is not None
    assert response.text == text
    assert "".join(pieces) == text
    assert all(piece in text for piece in pieces)
    assert len(pieces) > 1


@settings(max_examples=40)
@given(text=st.text(min_size=1, max_size=6), data=st.data())
def test_a_limit_inside_a_character_is_one_replacement(text: str, data: st.DataObject) -> None:
    spelled = text.encode()
    count = data.draw(st.integers(1, len(spelled)))
    channel = StreamChannel()
    response = speaker(spelled).handle_request(ask(PROMPT, count, channel=channel))
    assert response is not None
    whole = spelled[:count].decode("utf-8", "ignore")
    cut = len(whole.encode()) < count
    assert response.text == whole + "\ufffd" * cut
    chunk = channel.try_pop()
    assert chunk is not None
    assert chunk.text == response.text


@pytest.mark.parametrize("after", range(1, 4))
def test_a_preemption_inside_a_character_breaks_nothing(after: int) -> None:
    text = "😊 ok"
    runtime = speaker(text.encode())
    request = ask(PROMPT, len(text.encode()))
    execution = SteppedRequest.begin(runtime, request, 1)
    assert execution is not None
    (ref,) = execution.residents()
    said = [delta for _, delta in execution.prefill(ImmutablePrefillBatch(ref)).deltas]
    for _ in range(after - 1):
        result = execution.step(ImmutableStepBatch(decodes=(DecodeEntry(ref),)))
        said += [delta for _, delta in result.deltas]
    ((_, seed),) = execution.step(ImmutableStepBatch(preempt=(ref,))).preempted
    back = execution.admit(request, 0, 1, resume=seed)
    assert back.ref is not None
    known = len(PROMPT) + after
    batch = ImmutableStepBatch(prefills=(PrefillEntry(back.ref, known),))
    while execution.residents():
        result = execution.step(batch)
        said += [delta for _, delta in result.deltas]
        batch = ImmutableStepBatch(decodes=(DecodeEntry(back.ref),))
    response = execution.finish()
    assert response is not None
    assert response.text == "".join(delta.text for delta in said) == text
    assert_clean(runtime)


def test_a_prompt_may_begin_the_character_that_the_answer_ends() -> None:
    smile = "😊".encode()
    prompt = [*PROMPT.encode(), *smile[:2]]
    response = speaker(smile[2:] + b"!", len(prompt)).handle_request(ask(prompt, 3))
    assert response is not None
    assert response.text == "😊!"


def test_a_stop_string_of_many_bytes_is_found_across_them() -> None:
    spelled = "ab👩‍👩cd".encode()
    response = speaker(spelled).handle_request(ask(PROMPT, len(spelled), stop=("👩‍👩",)))
    assert response is not None
    assert (response.text, response.outputs[0].stop_reason) == ("ab", "👩‍👩")
    assert len(response.token_ids) == len("ab👩‍👩".encode())
