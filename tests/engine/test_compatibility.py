"""Every request field is classified, and a compared one alone keeps a request out."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from steppe.engine.compatibility import FIELD_CLASSES, BatchCompatibility, FieldClass
from steppe.engine.metrics import StallReason
from steppe.request import Guided, LLMGenerationRequest, SamplingParams

from .helpers import ask, run

if TYPE_CHECKING:
    from .conftest import MakeEngine

OTHER: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {3: 1.0},
    "seed": 5,
    "max_tokens": 9,
    "min_tokens": 1,
    "stop": ("x",),
    "stop_token_ids": (4,),
    "ignore_eos": True,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "skip_special_tokens": False,
    "include_stop": True,
    "guided": Guided(regex="a+"),
}


def test_every_field_is_classified_and_nothing_else() -> None:
    names = {one.name for one in fields(LLMGenerationRequest)} - {"params"}
    names |= {f"params.{one.name}" for one in fields(SamplingParams)}
    assert set(FIELD_CLASSES) == names


def test_nothing_is_founder_only_and_nothing_compared_unless_asked() -> None:
    assert FieldClass.FOUNDER_ONLY not in FIELD_CLASSES.values()
    assert BatchCompatibility().trivial


@pytest.mark.parametrize("name", OTHER)
def test_each_compared_field_alone_blocks_and_is_named(name: str) -> None:
    one, other = ask(8), ask(**{"max_tokens": 8} | {name: OTHER[name]})
    everything = BatchCompatibility(set(FIELD_CLASSES) - {"params.n"})
    assert everything.first_difference(one, one) == ""
    assert everything.first_difference(one, other) == f"params.{name}"
    assert everything.first_difference(other, one) == f"params.{name}"
    assert everything.obstacle(one, other) is StallReason.INCOMPATIBLE
    assert BatchCompatibility().obstacle(one, other) is None


def test_of_a_seed_only_its_presence_is_compared() -> None:
    seeds = BatchCompatibility({"params.seed"})
    assert seeds.first_difference(ask(seed=1), ask(seed=2)) == ""
    assert seeds.first_difference(ask(seed=1), ask()) == "params.seed"


def test_either_side_of_a_gate_blocks() -> None:
    classes = {
        **FIELD_CLASSES,
        "params.min_p": FieldClass.GUIDED,
        "params.ignore_eos": FieldClass.FOUNDER_ONLY,
    }
    gates = BatchCompatibility(classes=classes)
    assert not gates.trivial
    for special, reason in (
        (ask(min_p=0.5), StallReason.GUIDED),
        (ask(ignore_eos=True), StallReason.FOUNDER_ONLY),
    ):
        assert gates.obstacle(ask(), special) is reason
        assert gates.obstacle(special, ask()) is reason
        assert gates.obstacle(special, special) is reason
    assert gates.obstacle(ask(), ask()) is None


def test_an_incompatible_head_waits_counts_and_founds_the_next_batch(
    make_engine: MakeEngine,
) -> None:
    engine, runtime = make_engine(mixed=False, batch_fields=frozenset({"params.temperature"}))
    first = engine.submit(ask(6))
    other = engine.submit(ask(6, temperature=0.3))
    behind = engine.submit(ask(6))
    run(engine)
    assert [line[1] for line in runtime.log if line[0] == "found"] == [1, 2, 3]
    metrics = engine.metrics()
    assert metrics.stalls_incompatible > 5
    assert metrics.admitted_mid_flight == 0
    assert all(handle.get().token_ids for handle in (first, other, behind))
