"""The command line as a whole: help, version, and what an error looks like."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import steppe
from steppe.cli import COMMANDS, main

if TYPE_CHECKING:
    from pathlib import Path


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.strip() == f"steppe {steppe.__version__}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"steppe {command}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["fly"], ["generate"], ["generate", "--no-such-flag"]])
def test_a_wrong_line_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert "usage: steppe" in capsys.readouterr().err


def test_an_unknown_model_is_one_line_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tmp_path / "nothing.gguf"), "hi"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("steppe: ")
    assert "nothing.gguf" in err
    assert "Traceback" not in err


def test_python_dash_m_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "steppe", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"steppe {steppe.__version__}"
