"""A configuration survives its JSON, and nothing else passes for one."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.errors import EngineDirectoryError
from steppe.formats.checkpoint import open_checkpoint
from steppe.models.config import ModelConfig
from steppe.models.registry import load_model
from steppe.models.stored_config import config_from_json, config_to_json
from tests.oracle.zoo import VARIANTS, make, save
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_field_comes_back(variant: str, tmp_path: Path, seed: int) -> None:
    config = load_model(open_checkpoint(save(make(VARIANTS[variant], seed), tmp_path))).config
    back = config_from_json(json.loads(json.dumps(config_to_json(config))))
    for field in fields(ModelConfig):
        if field.name != "ropes":
            assert getattr(back, field.name) == getattr(config, field.name), field.name
    for ours, theirs in zip(back.ropes, config.ropes, strict=True):
        assert ours.inv_freq.tobytes() == theirs.inv_freq.tobytes()
        assert ours.inv_freq.dtype == theirs.inv_freq.dtype
        assert ours.scale == theirs.scale


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_tiny_model(tmp_path_factory.mktemp("config") / "tiny")
    config = config_to_json(load_model(open_checkpoint(folder)).config)
    config["experts"] = {
        "count": 4,
        "per_token": 2,
        "width": 8,
        "normalize": True,
        "layers": [0],
    }
    return json.loads(json.dumps(config))  # type: ignore[no-any-return]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS)


@settings(max_examples=300)
@given(st.data())
def test_another_value_is_a_configuration_or_refused(
    stored: dict[str, Any], data: st.DataObject
) -> None:
    changed = json.loads(json.dumps(stored))
    holder = changed
    key = data.draw(st.sampled_from(sorted(changed)))
    if isinstance(changed[key], dict) and data.draw(st.booleans()):
        holder, key = changed[key], data.draw(st.sampled_from(sorted(changed[key])))
    if data.draw(st.booleans()):
        holder[key] = data.draw(VALUES)
    elif data.draw(st.booleans()):
        del holder[key]
    else:
        holder[key + "?"] = data.draw(VALUES)
    refusal = ""
    try:
        assert isinstance(config_from_json(changed), ModelConfig)
    except EngineDirectoryError as error:
        refusal = str(error)
    assert not refusal or "rebuild it with steppe build" in refusal
