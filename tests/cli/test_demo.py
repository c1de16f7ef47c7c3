"""What `make demo` promises: a correct answer of a real model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steppe.backends.native import _native
from steppe.cli import main

MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"


def demo_words() -> list[str]:
    """The demo's own arguments, read from the Makefile."""
    recipe = MAKEFILE.read_text(encoding="utf-8").partition("demo:")[2].partition("\n\n")[0]
    command = recipe.partition("steppe generate")[2].replace("\\\n", " ")
    return [
        "generate",
        *(quoted or word for quoted, word in re.findall(r'"([^"]*)"|(\S+)', command)),
    ]


@pytest.mark.parametrize("isa", _native.variants())
@pytest.mark.usefixtures("smollm2_gguf")
def test_the_demo_names_the_capital(
    isa: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = demo_words()
    assert words[1:3] == ["smollm2-135m", "What is the capital of France?"]
    monkeypatch.setenv("STEPPE_ISA", isa)
    assert main(words) == 0
    assert capsys.readouterr().out.strip() == "The capital of France is Paris."


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_gguf")
def test_the_reference_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*demo_words(), "--backend", "torch"]) == 0
    assert capsys.readouterr().out.strip() == "The capital of France is Paris."
