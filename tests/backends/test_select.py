"""Which backend a name means."""

from __future__ import annotations

from typing import Any

import pytest

from steppe.backends.select import create_backend
from steppe.errors import BackendError


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({}, "native"),
        ({"name": "native", "threads": 1, "page_size": 64}, "native"),
        ({"name": "torch"}, "torch"),
        ({"dtype": "float32"}, "torch"),
        ({"name": "torch", "dtype": "bfloat16", "page_size": 32}, "torch"),
    ],
)
def test_a_name_and_what_else_is_asked_choose(asked: dict[str, Any], chosen: str) -> None:
    backend = create_backend(**asked)
    assert backend.name == chosen
    assert backend.page_size == asked.get("page_size", 64)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"name": "cuda-magic"}, "auto or native or torch"),
        ({"dtype": "float16"}, "float16"),
        ({"device": "abacus"}, "abacus"),
        ({"name": "native", "device": "cuda"}, "cuda"),
        ({"name": "native", "dtype": "float32"}, "dtype must be auto"),
        ({"name": "native", "page_size": 16}, "64 tokens"),
        ({"threads": 0}, "at least 1"),
        ({"name": "torch", "threads": 0}, "at least 1"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(BackendError, match=why):
        create_backend(**asked)
