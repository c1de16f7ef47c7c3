"""``steppe chat``: turns, commands, and Ctrl-C."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from steppe import LLM, SamplingParams
from steppe.cli import main
from steppe.cli.chat import Conversation
from steppe.cli.generate import Answer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from steppe import StreamChunk

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny) as llm:
        yield llm


def test_every_turn_sees_those_before_it(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, PARAMS, "Be brief")
    conversation.take("one")
    conversation.take("two")
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    said = conversation.messages[2]["content"]
    assert said == llm.chat(conversation.messages[:2], PARAMS).text
    assert conversation.messages[4]["content"] == llm.chat(conversation.messages[:4], PARAMS).text
    assert capsys.readouterr().out.startswith(said + "\n")


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Answer.add

    def interrupted(answer: Answer, chunk: StreamChunk) -> None:
        add(answer, chunk)
        if len(answer.token_ids) >= 2:
            raise KeyboardInterrupt

    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    conversation = Conversation(llm, long, None)
    monkeypatch.setattr(Answer, "add", interrupted)
    conversation.take("one")
    monkeypatch.setattr(Answer, "add", add)
    # On a busy machine the first chunk may be long already; the next turn must fit the context.
    conversation._params = PARAMS
    assert "[stopped]" in capsys.readouterr().out
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    assert llm.chat([{"role": "user", "content": "x"}], PARAMS).finish_reason == "length"
    assert llm.engine.metrics().cancelled == 1
    conversation.take("two")
    assert len(conversation.messages) == 4


def test_commands_change_the_conversation(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, PARAMS, None)
    conversation.take("one")
    conversation.take("/reset")
    assert conversation.messages == []
    conversation.take("/system You are a pirate")
    assert conversation.messages == [{"role": "system", "content": "You are a pirate"}]
    conversation.take("/dance")
    assert "/dance" in capsys.readouterr().err
    assert len(conversation.messages) == 1


def test_a_turn_that_cannot_be_asked_costs_the_turn_only(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(llm, PARAMS, None)
    conversation.take("one")
    before = list(conversation.messages)
    conversation.take("long " * 100)
    assert "steppe: messages:" in capsys.readouterr().err
    assert conversation.messages == before


def test_input_ends_the_chat(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n/exit\nnever\n"))
    assert main(["chat", str(tiny), "--max-tokens", "4", "--temperature", "0"]) == 0
    with LLM(tiny) as llm:
        params = llm.sampling_params(max_tokens=4, temperature=0)
        said = llm.chat([{"role": "user", "content": "hello"}], params).text
    assert capsys.readouterr().out == said + "\n"
