"""How many pages a configuration pays for."""

from __future__ import annotations

from typing import Any

import pytest

from steppe.errors import ConfigError
from steppe.runtime import config as config_module
from steppe.runtime.config import RuntimeConfig, pool_pages
from tests.runtime.fakes import FakeBackend, FakeProgram

PAGE = 8 * 8 * 2
"""Bytes of a fake page of 8 tokens, both cache groups."""


def traced() -> FakeBackend:
    backend = FakeBackend(page_size=8)
    backend.trace(FakeProgram(groups=2))
    return backend


@pytest.mark.parametrize(
    "field", ["max_batch_size", "max_model_len", "kv_memory", "max_step_tokens"]
)
@pytest.mark.parametrize("value", [0, -1, True])
def test_a_size_below_one_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig(**{field: value})
    assert caught.value.field == field


def test_an_unknown_type_of_cache_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="int8") as caught:
        RuntimeConfig(kv_dtype="int4")
    assert caught.value.field == "kv_dtype"


@pytest.mark.parametrize(
    ("memory", "pages"),
    [
        (PAGE, 1),
        (3 * PAGE - 1, 2),
        (3 * PAGE, 3),
        (1000 * PAGE, 2 * 25),  # two seats of 200 tokens need no more
    ],
)
def test_memory_buys_whole_pages_up_to_what_the_seats_can_use(memory: int, pages: int) -> None:
    config = RuntimeConfig(max_batch_size=2, kv_memory=memory)
    assert pool_pages(config, traced(), 200) == pages


def test_memory_for_less_than_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"{PAGE - 1} bytes .* takes {PAGE}") as caught:
        pool_pages(RuntimeConfig(kv_memory=PAGE - 1), traced(), 200)
    assert caught.value.field == "kv_memory"


@pytest.mark.parametrize(
    ("free", "pages"),
    [
        (2**40, 50),  # plenty: all that the seats can use
        (4 * 30 * PAGE, 30),  # a quarter of what is free
        (0, 25),  # but always one whole context
    ],
)
def test_unsaid_memory_follows_what_is_free(
    monkeypatch: pytest.MonkeyPatch, free: int, pages: int
) -> None:
    monkeypatch.setattr(config_module, "_free_memory", lambda: free)
    assert pool_pages(RuntimeConfig(max_batch_size=2), traced(), 200) == pages


def test_free_memory_is_read_from_the_machine() -> None:
    assert config_module._free_memory() > 0
