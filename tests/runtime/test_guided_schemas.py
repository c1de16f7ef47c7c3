"""Random schemas on a model with random weights: what it says always validates, in any company."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe import LLM
from steppe.request import FinishReason, Guided, LLMGenerationRequest, SamplingParams
from tests.runtime.guides import BRIEF, schemas
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = write_tiny_model(tmp_path_factory.mktemp("guided") / "tiny")
    with LLM(model, max_batch_size=4, threads=1, max_step_tokens=24) as llm:
        yield llm


def check(llm: LLM, asked: Sequence[dict[str, Any]], seed: int, *, brief: bool) -> None:
    params = [
        SamplingParams(
            temperature=1.3,
            seed=seed + index,
            max_tokens=180,
            logit_bias=BRIEF if brief else None,
            guided=Guided(json_schema=schema),
        )
        for index, schema in enumerate(asked)
    ]
    requests = [LLMGenerationRequest("a prompt " * 5, params=one) for one in params]
    free = SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True)
    requests.append(LLMGenerationRequest("no guide", params=free))
    handles = [llm.engine.submit(request) for request in requests]
    together = [handle.get() for handle in handles]
    for request, answer in zip(requests, together, strict=True):
        alone = llm.engine.submit(request).get()
        assert alone.token_ids == answer.token_ids
        assert alone.text == answer.text
    for schema, answer in zip(asked, together, strict=False):
        assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if answer.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(answer.text), schema)
        elif brief:
            pytest.fail(f"no end: {answer.text!r}")
    assert llm.engine.metrics().stalls_guided == 0


@settings(max_examples=12)
@given(st.lists(schemas(), min_size=1, max_size=3), st.integers(0, 2**32), st.booleans())
def test_what_is_said_validates_and_company_changes_nothing(
    llm: LLM, asked: list[dict[str, Any]], seed: int, brief: bool
) -> None:
    check(llm, asked, seed, brief=brief)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1000)
@given(st.lists(schemas(), min_size=1, max_size=3), st.integers(0, 2**32), st.booleans())
def test_a_thousand_schemas(llm: LLM, asked: list[dict[str, Any]], seed: int, brief: bool) -> None:
    check(llm, asked, seed, brief=brief)
