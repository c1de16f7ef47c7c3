"""``steppe pull``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_model_that_is_there_is_only_named(
    smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "smollm2-135m"]) == 0
    assert capsys.readouterr().out.strip() == str(smollm2_gguf)


def test_an_unknown_name_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "gpt-17"]) == 2
    assert "smollm2-135m" in capsys.readouterr().err
