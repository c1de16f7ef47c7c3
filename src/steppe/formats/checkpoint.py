"""A checkpoint, whatever its format: configuration and named tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from steppe.errors import CheckpointError, EngineDirectoryError
from steppe.formats.engine_directory import GGUF_METADATA, MANIFEST, read_engine_directory
from steppe.formats.gguf import read_gguf
from steppe.formats.resolve import resolve
from steppe.formats.safetensors import read_hf_config, read_hf_directory
from steppe.formats.tensor import StoredTensor

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from steppe.formats.engine_directory import EngineDirectory
    from steppe.formats.mapped import MappedFile

__all__ = ["Checkpoint", "StoredTensor", "TensorTable", "open_checkpoint"]


class TensorTable(Mapping[str, StoredTensor]):
    """Tensors by name, in file order. Raises `CheckpointError` once its checkpoint is closed."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self._tensors: dict[str, StoredTensor] | None = tensors

    def _open(self) -> dict[str, StoredTensor]:
        if self._tensors is None:
            raise CheckpointError("this checkpoint is closed")
        return self._tensors

    def __getitem__(self, name: str) -> StoredTensor:
        return self._open()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open())

    def __len__(self) -> int:
        return len(self._open())

    def close(self) -> None:
        self._tensors = None


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An open checkpoint. A context manager; leaving it closes.

    ``kind`` says which configuration this is: for ``"hf"``, ``config`` is ``config.json`` and
    ``generation_config`` its neighbour (``{}`` if there is none); for ``"gguf"``, ``config`` is the
    metadata, string arrays as sequences of ``str``, numeric arrays as numpy arrays, and
    ``generation_config`` is ``{}``. ``path`` is the directory or the (first) file, ``name`` a short
    title. ``files`` are those that were read. ``identity`` is a hex digest of their real paths,
    sizes and modification times: cheap, and a key for what is derived from them. Reading is safe
    from any thread; closing is the owner's business.

    An engine directory has the ``kind`` and configuration of what it was built from, no
    ``tensors``, and everything else in ``engine``.
    """

    kind: Literal["gguf", "hf"]
    path: Path
    name: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]
    identity: str
    engine: EngineDirectory | None = None
    _maps: tuple[MappedFile, ...] = field(default=(), repr=False)

    def close(self) -> None:
        """Forget the tensors and unmap the files.

        Tensors, views and string arrays taken before stay valid and keep their file mapped while
        they live. A second call does nothing.
        """
        if isinstance(self.tensors, TensorTable):
            self.tensors.close()
        for file in self._maps:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_checkpoint(
    reference: str | Path, *, cache_dir: Path | None = None, offline: bool = False
) -> Checkpoint:
    """Find and open the model that ``reference`` names: see `steppe.formats.resolve.resolve`.

    No weights are read, they are mapped. Raises `ModelNotFoundError` if the reference leads
    nowhere, `CheckpointError` for damaged files, `UnsupportedModelError` for what we do not read.
    """
    found = resolve(reference, cache_dir=cache_dir, offline=offline)
    if found.kind == "engine":
        return _open_engine(found.path)
    if found.kind == "gguf":
        gguf = read_gguf(found.path)
        config, generation, tensors, maps = gguf.metadata, {}, gguf.tensors, gguf.files
        files = tuple(file.path for file in maps)
        title = config.get("general.name")
        path = files[0]
    else:
        hf = read_hf_directory(found.path)
        config, generation, tensors, maps = hf.config, hf.generation_config, hf.tensors, hf.files
        beside = ("config.json", "generation_config.json")
        present = [found.path / name for name in beside if (found.path / name).is_file()]
        files = (*present, *(file.path for file in maps))
        title = config.get("_name_or_path")
        path = found.path
    return Checkpoint(
        kind=found.kind,
        path=path,
        name=found.name or (title if isinstance(title, str) and title else path.stem),
        config=config,
        generation_config=generation,
        tensors=TensorTable(tensors),
        files=files,
        identity=file_identity(files),
        _maps=maps,
    )


def _open_engine(path: Path) -> Checkpoint:
    engine = read_engine_directory(path)
    config: Mapping[str, Any]
    generation: dict[str, Any] = {}
    maps: tuple[MappedFile, ...] = (engine.weights,)
    try:
        if engine.kind == "gguf":
            gguf = read_gguf(path / GGUF_METADATA)
            config, maps = gguf.metadata, (*gguf.files, *maps)
        else:
            config, generation = read_hf_config(path)
    except CheckpointError as error:
        engine.weights.close()
        raise EngineDirectoryError(f"{error}; rebuild {path} with steppe build") from error
    return Checkpoint(
        kind=engine.kind,
        path=path,
        name=engine.name,
        config=config,
        generation_config=generation,
        tensors=TensorTable({}),
        files=(path / MANIFEST, *engine.files, engine.weights.path),
        identity=engine.identity,
        engine=engine,
        _maps=maps,
    )


def file_identity(files: tuple[Path, ...]) -> str:
    """Hex digest over the real paths, sizes and modification times of ``files``."""
    digest = hashlib.sha256()
    for file in files:
        try:
            real = file.resolve(strict=True)
            status = real.stat()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        stamp = f"{status.st_size} {status.st_mtime_ns}"
        digest.update(os.fsencode(real) + b"\0" + stamp.encode() + b"\0")
    return digest.hexdigest()
