"""``steppe serve``: its flags, and what it says about itself."""

from __future__ import annotations

import argparse
import importlib.util
from typing import TYPE_CHECKING

import pytest

from steppe.cli import main, serve
from steppe.client import LocalClient
from steppe.errors import ConfigError
from steppe.server.settings import ServerSettings
from tests.server.support import fake_llm

if TYPE_CHECKING:
    from pathlib import Path


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(["model", *words])


def test_without_flags_the_settings_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve.API_KEY_VARIABLE, raising=False)
    assert serve.server_settings(parsed()) == ServerSettings()


def test_every_flag_arrives() -> None:
    arguments = parsed(
        *("--served-model-name", "a", "--served-model-name", "b", "--api-key", "k"),
        *("--cors-origin", "http://x", "--max-body-size", "1000", "--max-prompt-tokens", "9"),
        *("--queue-timeout", "1.5", "--request-timeout", "2", "--write-timeout", "3"),
        *("--drain-timeout", "0", "--max-resume", "7", "--resume-buffer", "2000"),
        *("--host", "here.example", "--allowed-host", "there.example"),
    )
    assert serve.server_settings(arguments) == ServerSettings(
        served_names=("a", "b"),
        api_keys=("k",),
        cors_origins=("http://x",),
        max_body_bytes=1000,
        max_prompt_tokens=9,
        queue_timeout=1.5,
        request_timeout=2.0,
        write_timeout=3.0,
        drain_timeout=0.0,
        max_resume=7.0,
        resume_buffer=2000,
        allowed_hosts=("there.example", "here.example"),
    )


def test_a_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.API_KEY_VARIABLE, "secret")
    assert serve.server_settings(parsed()).api_keys == ("secret",)
    assert serve.server_settings(parsed("--api-key", "flag")).api_keys == ("flag",)
    # A key that is given and empty is a mistake, not a door left open.
    with pytest.raises(ConfigError):
        serve.server_settings(parsed("--api-key", ""))


def test_the_first_line_says_what_was_decided_and_why(tmp_path: Path) -> None:
    arguments = parsed("--max-model-len", "64", "--api-key", "secret")
    settings = serve.server_settings(arguments)
    with fake_llm(tmp_path, max_model_len=64, max_batch_size=4) as llm:
        line = serve.startup_line(LocalClient.of(llm).card, arguments, settings, "::1", 81)
    assert line.startswith("serving tiny at http://[::1]:81: context 64 (--max-model-len); ")
    assert "cache for 256 tokens (from free memory)" in line
    assert "1 API key" in line
    assert "secret" not in line
    assert "\n" not in line


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    with pytest.raises(ConfigError, match=rf"{missing}.*steppe\[server\]"):
        serve.run(parsed())


def test_help_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for heading in ("http:", "engine:", "time limits, in seconds:", "running the model:"):
        assert heading in text
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    assert all(action.help for action in parser._actions)


def test_the_mistakes_of_a_command_line_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["serve", str(tmp_path), "--port", "0", "--drain-timeout", "-1"]) != 0
    assert "drain_timeout" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "nothing"), "--port", "0"]) != 0
    assert "nothing" in capsys.readouterr().err


def test_a_system_prompt_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    assert serve.read_system_prompt(None) is None
    path.write_text("Be brief.\nBe kind.\n\n")
    prompt = serve.read_system_prompt(path)
    assert prompt == "Be brief.\nBe kind."
    arguments = parsed("--system-prompt-file", str(path))
    assert arguments.context_cache
    assert arguments.system_prompt_file == path
    with fake_llm(tmp_path, system_prompt=prompt) as llm:
        assert llm.pinned_tokens >= 16
    for content in (b"", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="system-prompt-file"):
            serve.read_system_prompt(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        serve.read_system_prompt(tmp_path / "missing")
    assert not parsed("--no-context-cache").context_cache
