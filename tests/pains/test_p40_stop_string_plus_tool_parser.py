"""P39, P40, P55: bytes, stop strings, reasoning, tools, in that order, also what is flushed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.text.pipeline import TextPipeline
from steppe.text.reasoning.families import QWEN3
from steppe.text.reasoning.splitter import ReasoningSplitter
from steppe.text.tools.calls import CallPart, ToolCall, joined_calls
from steppe.text.tools.families import HERMES
from steppe.text.tools.parser import ToolParser
from tests.runtime.fakes import byte_tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>'
ANSWER = f"<think>\nI look 🤔\n</think>\n\nLet me see.\n{CALL}"


def deliver(
    answer: str, stop: str = "", step: int = 1, most: int | None = None
) -> tuple[str, str, list[ToolCall]]:
    """Reasoning, content and calls of an answer that comes ``step`` tokens at a time."""
    tokenizer = byte_tokenizer()
    pipeline = TextPipeline(tokenizer, [stop] if stop else [])
    splitter, parser = ReasoningSplitter(QWEN3), ToolParser(HERMES, ["f"])
    ids = tokenizer.encode(answer)
    truncated = most is not None and most < len(ids)
    reasoning, content = "", ""
    pieces: list[CallPart] = []

    def pass_on(text: str, *, last: bool) -> None:
        nonlocal reasoning, content
        deltas = [splitter.push(text)] + ([splitter.flush()] if last else [])
        for delta in deltas:
            reasoning += delta.reasoning
            parts = parser.push(delta.content)
            for part in parts:
                content += part.content
                pieces.extend(part.calls)
        if last:
            for part in parser.flush(truncated=truncated):
                content += part.content
                pieces.extend(part.calls)

    ids = ids[:most]
    for at in range(0, len(ids), step):
        delta = pipeline.push(ids[at : at + step])
        if delta.stop is not None:
            pass_on(delta.text, last=True)
            return reasoning, content, list(joined_calls(pieces))
        pass_on(delta.text, last=False)
    pass_on(pipeline.finish().text, last=True)
    return reasoning, content, list(joined_calls(pieces))


def test_everything_goes_where_it_belongs() -> None:
    arguments = '{"city": "Köln", "days": 3}'
    expected = ("I look 🤔\n", "Let me see.\n", [ToolCall("f", arguments)])
    for step in (1, 2, 7, 1000):
        assert deliver(ANSWER, step=step) == expected


@pytest.mark.parametrize("stop", ["days", "}}", "\n</tool", "arguments", "Köln"])
def test_what_a_stop_string_leaves_of_a_call_is_not_lost(stop: str) -> None:
    reasoning, content, calls = deliver(ANSWER, stop)
    assert reasoning == "I look 🤔\n"
    visible = ANSWER[: ANSWER.index(stop)]
    if stop == "arguments":  # it has not begun
        assert content == visible[visible.index("Let") :]
        assert calls == []
        return
    assert content == "Let me see.\n"
    (call,) = calls
    # Where only the end tag is missing, nothing was cut off.
    assert call.complete == (stop == "\n</tool")
    assert visible.endswith(call.arguments + "}" * call.complete)


@given(most=st.integers(0, len(ANSWER.encode())), step=st.integers(1, 9))
def test_a_cut_off_answer_never_holds_a_whole_call_and_loses_nothing(most: int, step: int) -> None:
    reasoning, content, calls = deliver(ANSWER, step=step, most=most)
    assert (reasoning, content, calls) == deliver(ANSWER, step=1000, most=most)
    whole = most == len(ANSWER.encode())
    assert "<think>" not in content
    assert "</think>" not in content
    said = ANSWER.encode()[:most].decode(errors="replace")
    if whole:
        assert [call.complete for call in calls] == [True]
    elif calls:
        assert [call.complete for call in calls] == [False]
        words = "Let me see.\n"
        assert content.startswith(words)
        assert said.endswith(calls[0].arguments + content.removeprefix(words))
        with pytest.raises(json.JSONDecodeError):
            json.loads(calls[0].arguments)
    elif "Let" in said:
        assert content == said[said.index("Let") :]


@given(st.lists(st.sampled_from(["{", "}", '"', "x", "days", CALL, "<tool_call>"]), max_size=6))
def test_streamed_and_whole_are_the_same(scraps: list[str]) -> None:
    text = "".join(scraps)
    assert deliver(text, "days") == deliver(text, "days", step=10_000)
