"""Writing an engine directory: all of it or nothing, and never over something else."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from steppe.errors import EngineDirectoryError
from steppe.formats.engine_directory import (
    ALIGNMENT,
    FORMAT_VERSION,
    GGUF_METADATA,
    MAGIC,
    MANIFEST,
    SOURCE_FILES,
    SOURCE_FOLDERS,
    WEIGHTS,
)
from steppe.formats.mapped import shorten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["EngineWriter"]

_OWN = (MANIFEST, WEIGHTS, GGUF_METADATA)


class EngineWriter:
    """A context manager: the directory appears at ``target`` when ``finish`` has run.

    Everything is written into a temporary folder beside ``target`` and renamed; an engine directory
    that is there already is then replaced, anything else is refused at once. Leaving without
    ``finish`` removes what was written. One thread. Raises `EngineDirectoryError` for a target that
    cannot be, OSError when the disk says no.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._check()
        target.parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        self._folder.chmod(0o755)
        self._files: dict[str, dict[str, Any]] = {}
        self._entries: list[dict[str, Any]] = []
        self._weights: IO[bytes] = (self._folder / WEIGHTS).open("wb")

    def _check(self) -> None:
        """Is there nothing at the target, an empty folder, or an engine directory?"""
        target = self._target
        if not os.path.lexists(target):
            return
        if target.is_symlink() or not target.is_dir():
            raise EngineDirectoryError(f"{target}: exists and is no directory")
        names = {entry.name for entry in target.iterdir()}
        foreign = names.difference(SOURCE_FILES, SOURCE_FOLDERS, _OWN)
        if names and (foreign or MANIFEST not in names):
            held = shorten(min(foreign)) if foreign else "no manifest"
            raise EngineDirectoryError(
                f"{target}: is no engine directory (it holds {held}) and is not overwritten"
            )

    def add_file(self, name: str, content: bytes) -> None:
        """A file beside the weights; ``name`` may name a folder in front."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(content)
            _sync(file)
        digest = hashlib.sha256(content).hexdigest()
        self._files[name] = {"bytes": len(content), "sha256": digest}

    def add_weight(
        self,
        names: Sequence[str],
        kind: str,
        shape: Sequence[int],
        data: NDArray[np.uint8],
        checksum: int,
    ) -> None:
        """The bytes of a parameter under all its names."""
        start = self._weights.tell()
        self._weights.write(data.data)
        self._entries.append(
            {
                "names": list(names),
                "format": kind,
                "shape": list(shape),
                "offset": start,
                "bytes": data.size,
                "checksum": f"{checksum:016x}",
            }
        )
        self._weights.write(bytes(-self._weights.tell() % ALIGNMENT))

    def finish(
        self,
        *,
        kind: Literal["gguf", "hf"],
        name: str,
        layout: str,
        quantize: str | None,
        model: Mapping[str, Any],
    ) -> int:
        """Write the manifest and put everything in its place; bytes of the packed weights."""
        size = self._weights.tell()
        _sync(self._weights)
        self._weights.close()
        manifest = {
            "kind": kind,
            "name": name,
            "layout": layout,
            "quantize": quantize or "",
            "model": model,
            "files": self._files,
            "weights_bytes": size,
            "weights": self._entries,
        }
        body = json.dumps(manifest, ensure_ascii=False, indent=1).encode()
        head = f"{MAGIC} {FORMAT_VERSION} {hashlib.sha256(body).hexdigest()}\n".encode()
        with (self._folder / MANIFEST).open("wb") as file:
            file.write(head + body)
            _sync(file)
        self._place()
        return size

    def _place(self) -> None:
        self._check()
        old = None
        if self._target.is_dir() and any(self._target.iterdir()):
            # A directory cannot be renamed over one that holds something.
            old = Path(tempfile.mkdtemp(prefix=f".{self._target.name}.", dir=self._target.parent))
            self._target.rename(old)
        try:
            self._folder.rename(self._target)
        except OSError:
            if old is not None:
                old.rename(self._target)
            raise
        if old is not None:
            shutil.rmtree(old)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._weights.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
