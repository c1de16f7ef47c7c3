"""Engine directories: a model whose weights already lie as a backend wants them.

``steppe build`` writes one (`steppe.formats.engine_writer`). In it are

* ``steppe.engine``: one line with the format version and the digest of the rest, then JSON: what
  the model is, where each weight lies, and size and digest of every other file;
* ``weights.packed``: the weights, each 64-byte aligned, each with a checksum of its own;
* what the tokenizer, the chat template and the generation defaults are read from: the files of a
  Hugging Face directory under their own names, or the metadata of a GGUF file.

Opening compares sizes, and digests of all but the weights: those are megabytes at most. A weight's
checksum is for whoever copies it, who touches each byte anyway. Whatever is wrong ends as an
`EngineDirectoryError`, since all that helps is to build the directory again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, cast

from steppe.errors import CheckpointError, EngineDirectoryError, ModelNotFoundError
from steppe.formats.jsonfile import parse_object
from steppe.formats.mapped import MappedFile, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "ALIGNMENT",
    "FORMAT_VERSION",
    "GGUF_METADATA",
    "MAGIC",
    "MANIFEST",
    "SOURCE_FILES",
    "SOURCE_FOLDERS",
    "WEIGHTS",
    "EngineDirectory",
    "PackedEntry",
    "is_engine_directory",
    "read_engine_directory",
]

FORMAT_VERSION: Final = 1
"""Raised whenever the manifest says something in another way. Weights have their own: `layout`."""

MANIFEST: Final = "steppe.engine"
WEIGHTS: Final = "weights.packed"
GGUF_METADATA: Final = "metadata.gguf"
MAGIC: Final = "steppe-engine"
ALIGNMENT: Final = 64
SOURCE_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)
"""What of a Hugging Face directory is read beside its weights, and so kept."""
SOURCE_FOLDERS: Final = {"additional_chat_templates": "*.jinja", "1_Pooling": "config.json"}
"""The same of its folders: which files are kept."""

_MAX_MANIFEST: Final = 256 << 20
_MAX_FILE: Final = 256 << 20
_MAX_NAME: Final = 1024


@dataclass(frozen=True, slots=True, eq=False)
class PackedEntry:
    """A parameter in ``format`` (plain float32 is ``"vector"``), under all its names.

    ``data`` is a view of the mapped file, ``checksum`` that of the bytes. Immutable: any thread.
    """

    names: tuple[str, ...]
    format: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    checksum: int


@dataclass(frozen=True, slots=True, eq=False)
class EngineDirectory:
    """An open engine directory. ``kind`` is that of the checkpoint it was built from, ``model`` the
    configuration as `steppe.models` wrote it, ``layout`` how the packed formats lie in memory,
    ``identity`` a digest of the manifest. Closing ``weights`` is the owner's business.
    """

    kind: Literal["gguf", "hf"]
    name: str
    layout: str
    quantize: str | None
    model: Mapping[str, Any]
    entries: tuple[PackedEntry, ...]
    files: tuple[Path, ...]
    weights: MappedFile
    identity: str


def is_engine_directory(path: Path) -> bool:
    """Whether ``path`` is an engine directory, sound or not."""
    return (path / MANIFEST).is_file() or (path / WEIGHTS).is_file()


def read_engine_directory(path: Path) -> EngineDirectory:
    """Open the engine directory at ``path``; no weight is read.

    Raises `EngineDirectoryError` for another version and for damaged, truncated or missing files.
    """
    identity, values = _read_manifest(path / MANIFEST)
    manifest = _Manifest(path, values)
    kind = manifest.text("kind")
    if kind not in ("gguf", "hf"):
        manifest.fail(f"it was built from {shorten(kind)}, which is no format")
    files = tuple(manifest.file(name, entry) for name, entry in manifest.mapping("files").items())
    needed = GGUF_METADATA if kind == "gguf" else "config.json"
    if path / needed not in files:
        manifest.fail(f"the manifest lists no {needed}")
    model = manifest.mapping("model")
    name, layout = manifest.text("name"), manifest.text("layout")
    quantize = manifest.text("quantize") or None
    try:
        weights = MappedFile(path / WEIGHTS)
    except (CheckpointError, ModelNotFoundError) as error:
        raise _broken(path, str(error)) from error
    try:
        return EngineDirectory(
            kind=cast('Literal["gguf", "hf"]', kind),
            name=name,
            layout=layout,
            quantize=quantize,
            model=model,
            entries=manifest.entries(weights),
            files=files,
            weights=weights,
            identity=identity,
        )
    except BaseException:
        weights.close()
        raise


def _broken(path: Path, what: str) -> EngineDirectoryError:
    return EngineDirectoryError(
        f"{path}: {what}; the engine directory is of no use: rebuild it with steppe build"
    )


def _read_manifest(path: Path) -> tuple[str, dict[str, Any]]:
    """Digest and content of a manifest."""
    raw = _read(path, _MAX_MANIFEST)
    head, _, body = raw.partition(b"\n")
    words = head[:200].decode("ascii", "replace").split()
    if len(words) != 3 or words[0] != MAGIC or not words[1].isdecimal():
        raise _broken(path, "this is no manifest of an engine directory")
    if words[1] != str(FORMAT_VERSION):
        raise _broken(
            path, f"format version {words[1][:20]}, but this Steppe reads {FORMAT_VERSION}"
        )
    digest = hashlib.sha256(body).hexdigest()
    if words[2] != digest:
        raise _broken(path, "the manifest is damaged: its digest is wrong")
    try:
        return digest, parse_object(body, str(path))
    except CheckpointError as error:
        raise _broken(path, str(error)) from error


def _read(path: Path, most: int) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise _broken(path, "not a regular file")
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except FileNotFoundError as error:
        raise _broken(path, "this file is missing") from error
    except OSError as error:
        raise _broken(path, f"this file cannot be read: {error}") from error
    if len(raw) > most:
        raise _broken(path, f"longer than {most} bytes")
    return raw


class _Manifest:
    """The manifest's JSON. Its digest is right, but that may be somebody's work."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def fail(self, what: str) -> NoReturn:
        raise _broken(self._path, what)

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str) or len(value) > _MAX_NAME:
            self.fail(f"{key} is missing from the manifest, or no text")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self._values.get(key)
        if not isinstance(value, dict):
            self.fail(f"{key} is missing from the manifest, or no object")
        return value

    def file(self, name: str, entry: object) -> Path:
        """A file beside the weights, after its size and digest have been compared."""
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or "\0" in name or not place.name:
            self.fail(f"{shorten(name)} is no place in an engine directory")
        match entry:
            case {"bytes": int(size), "sha256": str(digest)} if 0 <= size <= _MAX_FILE:
                pass
            case _:
                self.fail(f"{shorten(name)} is badly described")
        path = self._path.joinpath(*place.parts)
        content = _read(path, _MAX_FILE)
        if len(content) != size:
            self.fail(f"{name} has {len(content)} bytes, {size} were written")
        if hashlib.sha256(content).hexdigest() != digest:
            self.fail(f"{name} is damaged: its digest is wrong")
        return path

    def entries(self, weights: MappedFile) -> tuple[PackedEntry, ...]:
        said = self._values.get("weights")
        if not isinstance(said, list):
            self.fail("weights is missing from the manifest, or no list")
        size = self._values.get("weights_bytes")
        if size != weights.size:
            self.fail(f"{WEIGHTS} has {weights.size} bytes, {size} were written")
        names: set[str] = set()
        entries = tuple(self._entry(each, weights) for each in said)
        for entry in entries:
            for name in entry.names:
                if name in names:
                    self.fail(f"the weight {shorten(name)} is there twice")
                names.add(name)
        return entries

    def _entry(self, said: object, weights: MappedFile) -> PackedEntry:
        match said:
            case {
                "names": [str(), *_] as names,
                "format": str(kind),
                "shape": [int(), *_] as shape,
                "offset": int(start),
                "bytes": int(size),
                "checksum": str(digest),
            } if all(isinstance(name, str) for name in names):
                pass
            case _:
                self.fail(f"a weight is badly described: {shorten(str(said))}")
        if not all(type(each) is int and 0 < each < 1 << 31 for each in shape):
            self.fail(f"the weight {shorten(names[0])} has an impossible shape")
        if start % ALIGNMENT or not 0 <= start <= start + size <= weights.size:
            self.fail(f"the weight {shorten(names[0])} does not lie in {WEIGHTS}")
        try:
            checksum = int(digest, 16)
        except ValueError:
            checksum = -1
        if not 0 <= checksum < 1 << 64:
            self.fail(f"the weight {shorten(names[0])} has an impossible checksum")
        data = weights.view[start : start + size]
        return PackedEntry(tuple(names), kind, tuple(shape), data, checksum)
