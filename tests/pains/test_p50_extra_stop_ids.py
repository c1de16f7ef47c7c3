"""P50: stop ids beside the EOS escaped the mask. One set is masked until the grammar may end."""

from __future__ import annotations

import json

import jsonschema
import pytest

from steppe.request import FinishReason, Guided, LLMGenerationRequest
from tests.runtime.fakes import EOS, IM_END, IM_START, assert_clean, fake_runtime
from tests.runtime.guides import BRIEF, guide

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "maxItems": 4},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
TILDE = ord("~")
"""A letter that a user made a stop id: it is text otherwise, and this schema could do without."""


@pytest.mark.parametrize("pushed", [EOS, IM_END, IM_START, TILDE, None])
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 100])
def test_a_stop_id_pushed_as_far_as_can_be_waits_for_the_end(
    pushed: int | None, ignore_eos: bool, min_tokens: int
) -> None:
    runtime, _ = fake_runtime()
    extra = [IM_START, TILDE]
    pushes = {} if pushed is None else {pushed: 100.0}
    batch = [
        guide(
            Guided(json_schema=SCHEMA),
            seed=seed,
            max_tokens=140,
            stop_token_ids=extra,
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
            logit_bias={token: bias for token, bias in BRIEF.items() if token < 256} | pushes,
        )
        for seed in range(4)
    ]
    response = runtime.handle_request(LLMGenerationRequest.batch(batch))
    assert response is not None
    stops = {*extra} if ignore_eos else {EOS, IM_END, *extra}
    for output in response.outputs:
        assert output.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(output.text), SCHEMA)
        *before, last = output.token_ids
        assert last in stops
        assert stops.isdisjoint(before)
        if pushed in stops:
            assert last == pushed
        assert output.stop_reason == (last if last in extra else None)
    assert_clean(runtime)
