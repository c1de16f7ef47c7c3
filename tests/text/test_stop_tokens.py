from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from steppe.errors import CheckpointError
from steppe.text.stop_tokens import resolve_stop_tokens

if TYPE_CHECKING:
    from steppe.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, {}, set()),
        ({"eos_token_id": 5}, {}, {5}),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {5, 6, 7}),
        ({"eos_token_id": None}, {"eos_token_id": [1, 106, 50]}, {1, 106, 50}),
        ({"text_config": {"eos_token_id": 9}}, {}, {9}),
        ({"eos_token_id": 10**6}, {}, set()),  # can never be sampled
        ({"eos_token_id": 500, "vocab_size": 512}, {}, {500}),  # a padded row can
    ],
)
def test_union_of_all_sources(
    byte_level: Tokenizer, config: dict[str, Any], generation: dict[str, Any], expected: set[int]
) -> None:
    found = resolve_stop_tokens(config, generation, byte_level, "hf")
    assert found == expected | {byte_level.eos_id}


def test_gguf_metadata_is_not_a_config(byte_level: Tokenizer) -> None:
    assert resolve_stop_tokens({"eos_token_id": 5}, {}, byte_level, "gguf") == byte_level.stop_ids


@pytest.mark.parametrize("value", [-1, "2", 1.5, True, [3, None]])
def test_what_is_no_id_is_refused(byte_level: Tokenizer, value: object) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id"):
        resolve_stop_tokens({}, {"eos_token_id": value}, byte_level, "hf")
