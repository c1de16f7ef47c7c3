"""A tiny model for the commands to run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory whose generation_config sets a temperature and top_k."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", temperature=0.7, top_k=20)
