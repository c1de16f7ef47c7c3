"""P34: degenerate grammars crashed the loop. They are refused by name before anything is queued."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from steppe import (
    LLM,
    InvalidRequestError,
    LLMGenerationRequest,
    RequestFailedError,
    SamplingParams,
)
from steppe.request import Guided
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

GOOD = SamplingParams(temperature=1.0, seed=4, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_tiny_model(tmp_path_factory.mktemp("p34") / "tiny"), threads=1) as llm:
        yield llm


@pytest.mark.parametrize(
    "guide",
    [
        {"json_object": False},
        {"json_schema": ""},
        {"json_schema": "null"},
        {"json_schema": "{"},
        {"json_schema": {"type": "strnig"}},
        {"json_schema": {"not": {"type": "string"}}},
        {"json_schema": {"type": "array", "uniqueItems": True}},
        {"json_schema": {"if": {}, "then": {}}},
        {"json_schema": {"type": "string", "format": "no such format"}},
        {"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
        {"json_schema": {"type": "string", "pattern": "("}},
        {"json_schema": {"type": "string", "pattern": "(?=a)b"}},
        {"json_schema": {"$ref": "http://example.invalid/x"}},
        {"json_schema": {"$ref": "#/nowhere"}},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"minimum": 5, "maximum": 3, "type": "integer"}},
        {"json_schema": {"enum": []}},
        {"json_schema": {"minLength": -1}},
        {"json_schema": {"type": "number", "multipleOf": 0}},
        {"regex": "("},
        {"regex": "[z-a]"},
        {"regex": "a{2,1}"},
        {"regex": "(?<=a)b"},
        {"regex": "a\\"},
        {"grammar": ""},
        {"grammar": "start: nothing"},
        {"grammar": "start: start"},
        {"grammar": 'first: "a"'},
        {"grammar": 'start: "a'},
        {"grammar": "%%%"},
        {"grammar": 'root ::= "a'},
        {"grammar": 'boot ::= "a"'},
        {"grammar": "root ::= " + "(" * 5000},
        {"grammar": 'start: "a" <|no_such_token|>'},
        {"choice": []},
    ],
    ids=repr,
)
def test_a_bad_grammar_is_refused_and_a_good_neighbour_is_not(
    llm: LLM, guide: dict[str, Any]
) -> None:
    before = llm.engine.metrics()
    neighbour = llm.engine.submit(_request(GOOD))
    with pytest.raises(InvalidRequestError) as caught:
        llm.engine.submit(_request(SamplingParams(max_tokens=5, guided=Guided(**guide))))
    assert caught.value.field == "guided"
    assert len(neighbour.get().token_ids) == 60
    after = llm.engine.metrics()
    assert after.submitted == before.submitted + 1
    assert after.failed == before.failed


def test_a_grammar_that_fails_in_the_middle_of_an_answer_fails_that_answer_alone(llm: LLM) -> None:
    # So many fields that may come next are found out to be too many when they may.
    fields = json.dumps({f"p{i}": {} for i in range(700)})
    grammar = f'start: /[xy]{{40}}/ %json {{"type": "object", "properties": {fields}}}'
    alone = llm.generate("neighbour", GOOD)
    neighbour = llm.engine.submit(_request(GOOD))
    params = SamplingParams(max_tokens=60, guided=Guided(grammar=grammar))
    failing = llm.engine.submit(_request(params))
    with pytest.raises(RequestFailedError, match="grammar"):
        failing.get()
    assert neighbour.get().token_ids == alone.token_ids
    assert llm.generate("neighbour", GOOD).token_ids == alone.token_ids


def _request(params: SamplingParams) -> LLMGenerationRequest:
    return LLMGenerationRequest("neighbour", params=params)
