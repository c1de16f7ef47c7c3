"""Grammars tried in another process: what it finds, and what becomes of one that never ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import llguidance
import pytest

from steppe.errors import SubmitError
from steppe.request import Guided
from steppe.runtime.guided.compiler import GrammarCompiler
from steppe.runtime.guided.limits import plainly_harmless
from steppe.runtime.guided.trial import tried
from tests.runtime.fakes import VOCAB, byte_tokenizer

LIBRARY = str(Path(llguidance.__file__).parent.parent)


@pytest.mark.parametrize(
    ("lark", "found"),
    [
        ('start: "a"', ""),
        ("start: /[a-z]*/", ""),
        ("start: nothing", "unknown name"),
        ('start: "a" <|only_the_model_knows|>', ""),
        ("start: A\nA: " + " & ".join(f"/.*[a-z]{{{i}}}.*/" for i in range(1, 40)), "within 1 s"),
        (
            "start: a0\n" + "".join(f'a{i}: "a" a{i + 1}\n' for i in range(6000)) + 'a6000: "b"',
            "too complex",
        ),
    ],
    ids=["text", "regex", "unknown rule", "special token", "endless", "overruns its stack"],
)
def test_what_a_trial_finds(lark: str, found: str) -> None:
    wrong = tried(lark, LIBRARY, 1)
    assert found in wrong
    assert bool(found) == bool(wrong)


def test_what_is_late_without_taking_processor_time_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*command: Any, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess, "run", never)
    assert "within 1 s" in tried("", LIBRARY, 1)


def test_without_an_interpreter_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*command: Any, **_: Any) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(subprocess, "run", never)
    monkeypatch.setattr(sys, "executable", "")
    assert "interpreter" in tried("", LIBRARY, 1)


def test_a_system_without_a_process_to_spare_is_no_fault_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = GrammarCompiler(byte_tokenizer(), VOCAB, frozenset())
    guided = Guided(regex="a+b")

    def never(*command: Any, **_: Any) -> None:
        raise BlockingIOError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", never)
        with pytest.raises(SubmitError):
            grammars.prepare(guided)
    grammars.prepare(guided)  # and it is not held against it


NESTED = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1]}}}}


@pytest.mark.parametrize(
    ("guided", "harmless"),
    [
        (Guided(json_object=True), True),
        (Guided(choice=["a", "b"]), True),
        (Guided(choice=["a" * 5000]), False),
        (Guided(json_schema=NESTED), True),
        (Guided(json_schema={**NESTED, "additionalProperties": False, "required": ["a"]}), True),
        (Guided(json_schema={"$defs": {"x": NESTED}, "anyOf": [{"$ref": "#/$defs/x"}]}), True),
        (Guided(json_schema={"type": "string", "maxLength": 100}), True),
        (Guided(json_schema={"type": "string", "maxLength": 100_000}), False),
        (Guided(json_schema={"type": "string", "pattern": "a"}), False),
        (Guided(json_schema={"properties": {"a": {"pattern": "a"}}}), False),
        (Guided(json_schema={"items": {"multipleOf": 3}}), False),
        (Guided(json_schema={"anyOf": [{"allOf": [{}]}]}), False),
        (Guided(json_schema={"anyOf": {}}), False),
        (Guided(json_schema={"items": 3}), False),
        (Guided(json_schema={"maxItems": "3"}), False),
        (Guided(json_schema={"description": "a" * 5000}), False),
        (Guided(regex="a"), False),
        (Guided(grammar='start: "a"'), False),
    ],
    ids=lambda value: json.dumps(value.source)[:50] if isinstance(value, Guided) else "",
)
def test_only_short_guides_of_plain_parts_are_not_tried(guided: Guided, harmless: bool) -> None:
    assert plainly_harmless(guided) == harmless
