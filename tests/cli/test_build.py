"""``steppe build``, and the commands on what it wrote."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from steppe.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_build_then_generate(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "engine"
    assert main(["build", str(tiny), "-o", str(engine)]) == 0
    assert capsys.readouterr().out.startswith(f"{engine}: tiny, ")
    answers = []
    for reference in (tiny, engine):
        words = ["generate", str(reference), "Hello", "--max-tokens", "9", "--seed", "4", "--json"]
        assert main(words) == 0
        answer = json.loads(capsys.readouterr().out)
        answers.append((answer["token_ids"], answer["sampling"], answer["model"]))
    assert answers[0] == answers[1]


def test_what_cannot_be_built_is_said(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(tmp_path / "nothing"), "-o", str(tmp_path / "engine")]) == 2
    assert main(["build", str(tiny), "-o", str(tiny)]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert not (tmp_path / "engine").exists()
