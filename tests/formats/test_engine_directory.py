"""Engine directories on disk: what is written is read, and what is not sound is refused."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.errors import EngineDirectoryError
from steppe.formats.checkpoint import open_checkpoint
from steppe.formats.engine_directory import (
    FORMAT_VERSION,
    MANIFEST,
    WEIGHTS,
    read_engine_directory,
)
from steppe.formats.engine_writer import EngineWriter
from steppe.formats.resolve import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def write(target: Path, *, name: str = "m") -> Path:
    """An engine directory of two made-up weights."""
    with EngineWriter(target) as writer:
        writer.add_file("config.json", json.dumps(CONFIG).encode())
        writer.add_file("1_Pooling/config.json", b"{}")
        writer.add_weight(["a", "b"], "Q8_0", (2, 32), np.arange(70, dtype=np.uint8), 7)
        writer.add_weight(["c"], "vector", (3,), np.zeros(12, np.uint8), 2**64 - 1)
        writer.finish(kind="hf", name=name, layout="here", quantize="q8", model={"x": [1.5]})
    return target


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and give it a digest that is right again."""
    head, _, body = (path / MANIFEST).read_bytes().partition(b"\n")
    manifest = json.loads(body)
    change(manifest)
    body = json.dumps(manifest).encode()
    words = [*head.split()[:2], hashlib.sha256(body).hexdigest().encode()]
    (path / MANIFEST).write_bytes(b" ".join(words) + b"\n" + body)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "deep" / "engine")
    engine = read_engine_directory(path)
    assert (engine.kind, engine.name, engine.layout, engine.quantize) == ("hf", "m", "here", "q8")
    assert engine.model == {"x": [1.5]}
    first, second = engine.entries
    assert (first.names, first.format, first.shape) == (("a", "b"), "Q8_0", (2, 32))
    assert (first.checksum, second.checksum) == (7, 2**64 - 1)
    np.testing.assert_array_equal(first.data, np.arange(70, dtype=np.uint8))
    assert all(entry.data.ctypes.data % 64 == 0 for entry in engine.entries)
    assert set(engine.files) == {path / "config.json", path / "1_Pooling" / "config.json"}
    assert resolve(path).kind == "engine"
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.kind, checkpoint.name, len(checkpoint.tensors)) == ("hf", "m", 0)
        assert checkpoint.config == CONFIG
        assert checkpoint.identity == engine.identity
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["engine"]


def test_building_again_replaces_the_directory(tmp_path: Path) -> None:
    write(tmp_path / "engine")
    write(tmp_path / "engine", name="again")
    assert read_engine_directory(tmp_path / "engine").name == "again"
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty", "engine"]


def test_a_foreign_directory_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.json").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(write(tmp_path / "engine"))
    (tmp_path / "engine" / "notes.txt").write_text("mine")
    for name in ("notes", "file", "link", "engine"):
        with pytest.raises(EngineDirectoryError, match="directory"):
            write(tmp_path / name, name="never")
    assert (tmp_path / "notes" / "config.json").read_text() == "mine"
    assert (tmp_path / "engine" / "notes.txt").read_text() == "mine"
    assert read_engine_directory(tmp_path / "engine").name == "m"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["engine", "file", "link", "notes"]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "engine")

    def interrupted() -> None:
        with EngineWriter(tmp_path / "engine") as writer:
            writer.add_file("config.json", b"{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [each.name for each in tmp_path.iterdir()] == ["engine"]
    assert read_engine_directory(tmp_path / "engine").name == "m"


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "other version": (
        lambda path: (path / MANIFEST).write_bytes(
            (path / MANIFEST).read_bytes().replace(b" 1 ", b" 99 ", 1)
        ),
        f"format version 99, but this Steppe reads {FORMAT_VERSION}",
    ),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "missing"),
    "another file": (lambda path: (path / MANIFEST).write_bytes(b"GGUF"), "no manifest"),
    "a folder": (
        lambda path: ((path / MANIFEST).unlink(), (path / MANIFEST).mkdir()),
        "not a regular file",
    ),
    "manifest cut": (
        lambda path: (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:-9]),
        "digest is wrong",
    ),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "no such file"),
    "weights cut": (
        lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1]),
        "were written",
    ),
    "no config": (lambda path: (path / "config.json").unlink(), "missing"),
    "config changed": (
        lambda path: (path / "config.json").write_text(
            json.dumps(CONFIG).replace("llama", "lLama")
        ),
        "config.json is damaged",
    ),
    "config longer": (
        lambda path: (path / "config.json").write_text(json.dumps(CONFIG) + " "),
        "bytes, .* were written",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_directory_says_to_rebuild_it(tmp_path: Path, what: str) -> None:
    path = write(tmp_path / "engine")
    harm, message = BROKEN[what]
    harm(path)
    for read in (read_engine_directory, open_checkpoint):
        with pytest.raises(EngineDirectoryError, match=message) as caught:
            read(path)
        assert "rebuild it with steppe build" in str(caught.value)


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "kind": lambda m: m.update(kind="onnx"),
    "no kind": lambda m: m.pop("kind"),
    "name": lambda m: m.update(name=["m"]),
    "layout": lambda m: m.update(layout="x" * 2000),
    "model": lambda m: m.update(model=[]),
    "config unlisted": lambda m: m["files"].pop("config.json"),
    "file elsewhere": lambda m: m["files"].update({"../up": m["files"]["config.json"]}),
    "absolute file": lambda m: m["files"].update({"/etc/hostname": m["files"]["config.json"]}),
    "file badly described": lambda m: m["files"].update({"config.json": 7}),
    "huge file": lambda m: m["files"]["config.json"].update(bytes=1 << 40),
    "weights no list": lambda m: m.update(weights={}),
    "weight no object": lambda m: m["weights"].append(3),
    "no names": lambda m: m["weights"][0].update(names=[]),
    "names no text": lambda m: m["weights"][0].update(names=["a", 3]),
    "twice": lambda m: m["weights"].append(m["weights"][0]),
    "no shape": lambda m: m["weights"][0].update(shape=[]),
    "negative shape": lambda m: m["weights"][0].update(shape=[-1, 32]),
    "true shape": lambda m: m["weights"][0].update(shape=[True, 32]),
    "unaligned": lambda m: m["weights"][0].update(offset=1),
    "before the file": lambda m: m["weights"][0].update(offset=-64),
    "behind the file": lambda m: m["weights"][0].update(offset=1 << 20),
    "too long": lambda m: m["weights"][0].update(bytes=1 << 62),
    "negative length": lambda m: m["weights"][0].update(bytes=-1),
    "no checksum": lambda m: m["weights"][0].update(checksum="hello"),
    "long checksum": lambda m: m["weights"][0].update(checksum="f" * 17),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    path = write(tmp_path / "engine")
    rewrite(path, LIES[lie])
    with pytest.raises(EngineDirectoryError, match="rebuild it with steppe build"):
        read_engine_directory(path)


@settings(max_examples=150)
@given(st.data())
def test_any_damage_but_of_weights_is_found(data: st.DataObject) -> None:
    """The weights' own checksums are looked at when they are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "engine")
        victim = path / data.draw(st.sampled_from([MANIFEST, "config.json"]))
        raw = bytearray(victim.read_bytes())
        at = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.booleans()):
            raw[at] ^= data.draw(st.integers(1, 255))
        else:
            del raw[at:]
        victim.write_bytes(raw)
        with pytest.raises(EngineDirectoryError):
            open_checkpoint(path)
