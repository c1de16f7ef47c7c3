"""P35: compiling a grammar as denial of service. Refused after a second, off the step loop."""

from __future__ import annotations

import json
import string
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from steppe import LLM, InvalidRequestError, LLMGenerationRequest, SamplingParams
from steppe.request import Guided
from steppe.runtime.guided.compiler import COMPILE_SECONDS
from steppe.runtime.guided.trial import PATIENCE
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = SamplingParams(temperature=1.0, seed=4, max_tokens=150, ignore_eos=True)
SLACK = 2.0
"""Seconds that a busy test machine may add."""


def _chain(link: str) -> dict[str, Any]:
    names = [f"d{i}" for i in range(2500)]
    links = json.loads(f"[{', '.join(link % name for name in names[1:])}]")
    return {
        "$defs": {**dict(zip(names, links, strict=False)), names[-1]: {"type": "null"}},
        "$ref": "#/$defs/d0",
    }


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _patterns() -> dict[str, Any]:
    words = ["".join(string.ascii_lowercase[i >> k & 1] for k in range(10)) for i in range(400)]
    return {"type": "object", "patternProperties": {f"^{word}": {"type": "null"} for word in words}}


def _optional(count: int) -> dict[str, Any]:
    return {f"p{i}": {} for i in range(count)}


def _rules(name: str, body: str, count: int) -> str:
    """A grammar of rules of which each is the next one, in ``body``."""
    numbered = [body.replace("%d", str(i + 1)) for i in range(count)]
    lines = [f"{name}{i}: {text}" for i, text in enumerate(numbered)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{count}: "b"'])


ATTACKS: dict[str, dict[str, Any]] = {
    "deep nesting": {"json_schema": _nested(300)},
    "a chain of references": {"json_schema": _chain('{"$ref": "#/$defs/%s"}')},
    "a chain of lists": {"json_schema": _chain('{"items": {"$ref": "#/$defs/%s"}}')},
    "optional fields": {"json_schema": {"type": "object", "properties": _optional(3000)}},
    "a large multiple": {"json_schema": {"type": "integer", "multipleOf": 999_983}},
    "many patterns": {"json_schema": _patterns()},
    "optional letters": {"regex": "a?" * 60_000},
    "doubled terminals": {"grammar": _rules("A", "A%d A%d", 60)},
    "an intersection": {
        "grammar": "start: A\nA: " + " & ".join(f"/.*[a-z]{{{i}}}.*/" for i in range(1, 40))
    },
    "a chain of rules": {"grammar": _rules("r", '"a" r%d', 6000)},
    "a chain of terminals": {"grammar": _rules("A", '"a" A%d', 6000)},
    "a schema in a grammar": {"grammar": 'start: %json {"type": "integer", "multipleOf": 999983}'},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_tiny_model(tmp_path_factory.mktemp("p35") / "tiny"), threads=1) as llm:
        yield llm


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_while_the_neighbour_is_served(llm: LLM, attack: str) -> None:
    guided = Guided(**ATTACKS[attack])
    neighbour = llm.engine.submit(LLMGenerationRequest("neighbour", params=LONG))
    began = time.perf_counter()
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate("attack", SamplingParams(max_tokens=5, guided=guided))
    took = time.perf_counter() - began
    assert caught.value.field == "guided"
    assert took < COMPILE_SECONDS * PATIENCE + SLACK
    assert len(str(caught.value)) < 500
    assert len(neighbour.get(timeout=10).token_ids) == 150
    # And asked again, it costs nothing.
    began = time.perf_counter()
    with pytest.raises(InvalidRequestError):
        llm.generate("attack", SamplingParams(max_tokens=5, guided=guided))
    assert time.perf_counter() - began < 0.5 * SLACK


def test_the_step_loop_goes_on_while_a_grammar_is_compiled(llm: LLM) -> None:
    # The attack takes all its time; answers that begin after it end before it is refused.
    slow = Guided(regex="b?" * 60_000)
    done: list[float] = []

    def attack() -> None:
        with pytest.raises(InvalidRequestError):
            llm.generate("attack", SamplingParams(max_tokens=5, guided=slow))
        done.append(time.perf_counter())

    thread = threading.Thread(target=attack)
    thread.start()
    short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    finished = 0
    while thread.is_alive():
        finished += len(llm.generate("a", short).token_ids) == 5
    thread.join()
    assert done
    assert finished > 10


@pytest.mark.parametrize(
    "guide",
    [
        {"regex": "(a{1,1000}){1,1000}"},
        {"json_schema": {"enum": [f"value {i}" for i in range(5000)]}},
        {"json_schema": {"type": "string", "minLength": 50_000}},
        {"choice": [f"choice {i}" for i in range(4000)]},
    ],
    ids=["counted twice", "many values", "a long string", "many choices"],
)
def test_what_only_looks_like_an_attack_is_followed(llm: LLM, guide: dict[str, Any]) -> None:
    answer = llm.generate("a", SamplingParams(seed=1, max_tokens=8, guided=Guided(**guide)))
    assert answer.token_ids
