"""Reasoning and content, whatever way the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.text.reasoning.families import DEEPSEEK_R1, QWEN3, reasoning_format
from steppe.text.reasoning.splitter import ReasoningSplitter
from tests.text.chunks import cut

OPEN = "<|im_start|>assistant\n<think>\n"
SHUT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN = "<|im_start|>assistant\n"

WORDS = st.lists(
    st.sampled_from(["a", "<", "</", "<think", "think>", " ", "\n", "</thin", "Grüße", "<think>"]),
    max_size=8,
).map("".join)


def split(pieces: list[str], tail: str = PLAIN) -> tuple[str, str]:
    splitter = ReasoningSplitter(QWEN3, prompt_tail=tail)
    deltas = [splitter.push(piece) for piece in pieces] + [splitter.flush()]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)


@pytest.mark.parametrize(
    ("tail", "text", "reasoning", "content"),
    [
        (PLAIN, "<think>\nlook\n</think>\n\nyes", "look\n", "yes"),
        (PLAIN, "\n<think>look</think>yes", "look", "yes"),
        (PLAIN, "  yes <think>no</think>", "", "  yes <think>no</think>"),
        (PLAIN, "<thinking>", "", "<thinking>"),
        (PLAIN, "<thi", "", "<thi"),
        (PLAIN, " ", "", " "),
        (PLAIN, "", "", ""),
        (PLAIN, "<think>cut off", "cut off", ""),
        (PLAIN, "<think>cut off</thi", "cut off</thi", ""),
        (PLAIN, "<think></think>", "", ""),
        (PLAIN, "<think>a</think>b</think>c", "a", "b</think>c"),
        (OPEN, "look</think>\n\nyes", "look", "yes"),
        (OPEN, "cut off", "cut off", ""),
        (OPEN, "", "", ""),
        (SHUT, "yes", "", "yes"),
        (SHUT, "<think>yes</think>", "", "<think>yes</think>"),
        ("a user wrote <think> here" + PLAIN, "yes", "", "yes"),
    ],
)
def test_what_is_reasoning_and_what_is_not(
    tail: str, text: str, reasoning: str, content: str
) -> None:
    assert split([text], tail) == (reasoning, content)
    assert split(list(text), tail) == (reasoning, content)


@given(data=st.data(), tail=st.sampled_from([PLAIN, OPEN, SHUT]))
def test_any_cut_gives_the_same(data: st.DataObject, tail: str) -> None:
    before, thought, after = (data.draw(WORDS) for _ in range(3))
    text = before + data.draw(st.sampled_from(["", "<think>"])) + thought
    text += data.draw(st.sampled_from(["", "</think>"])) + after
    whole = split([text], tail)
    assert split(data.draw(cut(text)), tail) == whole
    assert split(list(text), tail) == whole


@given(thought=WORDS, answer=WORDS, opened=st.booleans())
def test_nothing_is_lost_but_marks_and_the_space_after_them(
    thought: str, answer: str, opened: bool
) -> None:
    text = thought + "</think>" + answer if opened else f"<think>{thought}</think>{answer}"
    if "</think>" in thought:
        return
    expected = (thought.lstrip(), answer.lstrip())
    assert split([text], OPEN if opened else PLAIN) == expected


def test_only_what_may_be_a_mark_is_held_back() -> None:
    splitter = ReasoningSplitter(QWEN3)
    assert splitter.may_reason
    assert splitter.push("<think>a") == ("a", "")
    assert splitter.reasoning
    assert splitter.push("b </") == ("b ", "")
    assert splitter.push("b> <") == ("</b> ", "")
    assert splitter.push("/think>c <") == ("", "c <")
    assert not splitter.reasoning
    assert not splitter.may_reason
    assert splitter.push("think>") == ("", "think>")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages }}", None),
        ("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", QWEN3),
        ("{{ content.split('</think>')[-1] }}<think>\n", DEEPSEEK_R1),
    ],
)
def test_the_template_says_how_reasoning_is_marked(source: str, expected: object) -> None:
    assert reasoning_format({"default": source}) is expected


def test_no_template_no_marks() -> None:
    assert reasoning_format({}) is None
