"""A configuration may hold anything: what comes of it is a model, or an error that says what is
wrong.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from steppe.errors import ModelError
from steppe.formats.checkpoint import open_checkpoint
from steppe.models.registry import load_model
from tests.models.gguf_files import write_gguf
from tests.models.test_gguf_models import METADATA
from tests.oracle.zoo import VARIANTS, make, save

if TYPE_CHECKING:
    from pathlib import Path

    from steppe.formats.checkpoint import Checkpoint

NASTY: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    2**31 - 1,
    2**31,
    2**63,
    10**400,
    0.0,
    -0.5,
    1e-300,
    1e30,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "yarn",
    "linear",
    "llama3",
    "\ud800",
    [],
    [[]],
    ["sliding_attention"],
    [1e9],
    {},
    {"rope_type": "yarn"},
    {"full_attention": []},
)
ARRAYS = (np.zeros(3, np.int32), np.zeros(0), np.array([np.nan]))


def keys_of(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """Every field, nested ones too, and some that are not there."""
    paths: list[tuple[str, ...]] = [(key,) for key in config if not key.startswith("tokenizer.")]
    for key, value in config.items():
        if isinstance(value, dict):
            paths += [(key, *path) for path in keys_of(value)]
    return paths


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = path
    inner = changed(config[key], tuple(rest), value) if rest else value
    return config | {key: inner}


def attack(
    checkpoint: Checkpoint, seed: int, extra: list[str], nasty: tuple[Any, ...] = NASTY
) -> None:
    dice = random.Random(seed)
    config = dict(checkpoint.config)
    paths = keys_of(config) + [(key,) for key in extra]
    attempts = [(path, value) for path in paths for value in nasty]
    for path, value in dice.sample(attempts, min(300, len(attempts))):
        hostile = replace(checkpoint, config=changed(config, path, value))
        try:
            load_model(hostile)
        except ModelError:
            continue
        except Exception as error:
            raise AssertionError(f"{path} = {value!r}") from error


@pytest.mark.parametrize("name", VARIANTS)
def test_hugging_face(name: str, tmp_path: Path, seed: int) -> None:
    checkpoint = open_checkpoint(save(make(VARIANTS[name], seed), tmp_path))
    extra = ["rope_scaling", "rope_theta", "text_config", "layer_types", "sliding_window_pattern"]
    attack(checkpoint, seed, extra)


@pytest.mark.parametrize("name", METADATA)
def test_gguf(name: str, tmp_path: Path, seed: int) -> None:
    reference = make(VARIANTS[name], seed)
    path = write_gguf(reference, tmp_path / "x.gguf", metadata=METADATA[name])
    checkpoint = open_checkpoint(path)
    prefix = checkpoint.config["general.architecture"]
    more = ("expert_count", "rope.scaling.type", "rope.scale_linear", "attention.sliding_window")
    attack(checkpoint, seed, [f"{prefix}.{key}" for key in more], NASTY + ARRAYS)
