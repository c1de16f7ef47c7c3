"""What is installed: a wheel that needs no compiler, and a source that says what it needs."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from steppe.cli import main
from tests.native.built import VARIANTS, _native
from tests.native.standalone import ROOT, need
from tests.tiny_model import write_tiny_model

BUILT = {
    "x86_64": ["avx512_amx", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "portable"],
    "aarch64": ["neon_dotprod", "portable"],
}
GREEDY = ["--temperature", "0", "--max-tokens", "16", "--json"]
PROMPT = "What is the capital of France?"
PIP = ["-m", "pip", "--disable-pip-version-check", "install", "-q"]


def run(*command: str | Path, **environment: str) -> str:
    """The standard output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` makes, with the environment that runs the tests."""
    need("make", "c++")
    for module in ("auditwheel", "scikit_build_core", "nanobind"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"not run: there is no {module} here")
    dist = tmp_path_factory.mktemp("dist")
    words = ["wheel", f"VENV={sys.prefix}", f"DIST={dist}"]
    run("make", "-C", ROOT, "-o", f"{sys.prefix}/.dev", *words, **os.environ)
    (path,) = dist.iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of a fresh environment that holds the wheel and what it asks for."""
    scripts = tmp_path_factory.mktemp("fresh") / "bin"
    venv.create(scripts.parent, with_pip=True)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    asked = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not any("torch" in line for line in asked)
    fetch = [scripts / "python", *PIP, "--only-binary=:all:", *asked]
    done = subprocess.run(fetch, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"not run: no package index here: {done.stderr.strip()[-300:]}")
    # The wheel itself needs nothing more, and nothing outside the environment.
    run(scripts / "python", *PIP, "--no-index", wheel, **outside(scripts))
    return scripts


def outside(scripts: Path) -> dict[str, str]:
    """An environment with no compiler, no cmake and none of this one's packages."""
    return {"PATH": str(scripts), "HOME": str(scripts.parent), "HF_HUB_OFFLINE": "1"}


def answer(output: str) -> Any:
    """The tokens in what ``generate --json`` prints."""
    return json.loads(output)["token_ids"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_says_truly_where_it_runs(wheel: Path) -> None:
    pattern = rf"steppe-[^-]+-cp3\d+-cp3\d+-manylinux_2_(\d+)_{platform.machine()}\.whl"
    match = re.fullmatch(pattern, wheel.name)
    assert match, wheel.name
    report = run(sys.executable, "-m", "auditwheel", "show", wheel, **os.environ)
    consistent = " ".join(report.partition("references external")[0].split())
    assert f'following platform tag: "manylinux_2_{match[1]}_' in consistent
    with zipfile.ZipFile(wheel) as archive:
        libraries = [Path(name).name for name in archive.namelist() if ".so" in name]
    # One extension, no build of another interpreter, no library that was carried along.
    assert [name.partition(".")[0] for name in libraries] == ["_native"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_holds_every_module_and_nothing_beside_the_package(wheel: Path) -> None:
    source = ROOT / "src"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert len(modules) > 200
    assert modules | {"steppe/py.typed"} <= names
    outside = {name for name in names if not name.startswith("steppe/")}
    assert all(name.partition("/")[0].endswith(".dist-info") for name in outside), outside


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_holds_every_variant(installed: Path) -> None:
    words = "from steppe.backends.native import _native as n; import json, steppe; "
    words += "print(json.dumps([steppe.__file__, n.built_variants(), n.variants()]))"
    found = json.loads(run(installed / "python", "-c", words, **outside(installed)))
    assert Path(found[0]).is_relative_to(installed.parent)
    assert found[1] == BUILT[platform.machine()] == _native.built_variants()
    assert found[2] == VARIANTS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_installed_wheel_generates_without_a_compiler(
    installed: Path,
    tmp_path: Path,
    seed: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = write_tiny_model(tmp_path / "tiny", seed)
    for isa in VARIANTS:
        monkeypatch.setenv("STEPPE_ISA", isa)
        assert main(["generate", str(model), PROMPT, *GREEDY]) == 0
        expected = answer(capsys.readouterr().out)
        words = ["generate", model, PROMPT, *GREEDY]
        output = run(installed / "steppe", *words, STEPPE_ISA=isa, **outside(installed))
        assert answer(output) == expected
        assert len(expected) > 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_installed_wheel_answers_with_a_real_model(installed: Path, smollm2_gguf: Path) -> None:
    words = ["generate", smollm2_gguf, PROMPT, "--system", "Answer in one sentence.", *GREEDY]
    output = run(installed / "steppe", *words, **outside(installed))
    assert json.loads(output)["text"] == "The capital of France is Paris."


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="not run: of x86-64 machines only")
def test_a_wheel_runs_on_an_x86_without_avx(installed: Path, tmp_path: Path, seed: int) -> None:
    """Nothing outside a variant's own files may hold its instructions."""
    (emulator,) = need("qemu-x86_64")
    words = ["-m", "steppe", "generate", write_tiny_model(tmp_path / "tiny", seed), PROMPT, *GREEDY]
    old = run(emulator, "-cpu", "Nehalem", installed / "python", *words, **outside(installed))
    here = run(installed / "python", *words, STEPPE_ISA="portable", **outside(installed))
    assert answer(old) == answer(here)


def test_a_source_without_a_compiler_says_what_it_needs(tmp_path: Path) -> None:
    (cmake,) = need("cmake")
    done = subprocess.run(
        [cmake, "-S", ROOT / "csrc", "-B", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CXX": "/nowhere/c++"},
    )
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "no C++ compiler was found. Install g++ 11 or clang 14 or newer" in message
    assert message.count("CMake Error") == 1
