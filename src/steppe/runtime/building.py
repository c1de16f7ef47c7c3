"""From a model to an engine directory: what ``steppe build`` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.errors import CheckpointError, EngineDirectoryError
from steppe.formats.checkpoint import open_checkpoint
from steppe.formats.engine_directory import GGUF_METADATA, SOURCE_FILES, SOURCE_FOLDERS
from steppe.formats.engine_writer import EngineWriter
from steppe.formats.gguf import metadata_section
from steppe.models.registry import Model
from steppe.models.stored_config import config_to_json
from steppe.runtime.artifacts import artifacts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from steppe.backends.base import WeightTensor
    from steppe.formats.checkpoint import Checkpoint

__all__ = ["BuiltEngine", "build_engine"]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine directory that has been written, and the bytes of its weights."""

    path: Path
    name: str
    weight_bytes: int


def build_engine(
    reference: str | Path,
    target: Path,
    *,
    quantize: str | None = None,
    cache_dir: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> BuiltEngine:
    """Pack the weights of the model ``reference`` names for the native backend, and write them with
    all else that running it takes to ``target``.

    ``quantize`` is that of `steppe.runtime.artifacts.load_artifacts`. The directory appears at once
    and whole; an engine directory that is there is replaced. ``on_progress`` is called with the
    weights done and all of them. One weight is in memory at a time.

    Raises ModelError and its kin for a model that cannot be used, EngineDirectoryError for a target
    that cannot be written, BackendError where the native backend is not built.
    """
    # Imported here, since only who builds should need (or wait for) the extension.
    from steppe.backends.native import _native
    from steppe.backends.native.weights import pack

    with open_checkpoint(reference, cache_dir=cache_dir) as checkpoint:
        if checkpoint.engine is not None:
            raise EngineDirectoryError(f"{checkpoint.path} is an engine directory already")
        # All of it, though only the program is packed: a tokenizer that we cannot read should fail
        # here and not where the directory is used.
        artifacts = artifacts_of(checkpoint, quantize=quantize, cache_dir=cache_dir)
        program = artifacts.program
        assert isinstance(program, Model)
        weights = _by_identity(program.weights)
        try:
            with EngineWriter(target) as writer:
                for name, content in _description(checkpoint):
                    writer.add_file(name, content)
                for done, (weight, names) in enumerate(weights):
                    packed = pack(weight)
                    writer.add_weight(
                        names, packed.format, weight.shape, packed.data, packed.checksum
                    )
                    if on_progress is not None:
                        on_progress(done + 1, len(weights))
                size = writer.finish(
                    kind=checkpoint.kind,
                    name=checkpoint.name,
                    layout=_native.LAYOUT,
                    quantize=quantize,
                    model=config_to_json(program.config),
                )
        except OSError as error:
            raise EngineDirectoryError(f"{target}: cannot be written: {error}") from error
    return BuiltEngine(target, checkpoint.name, size)


def _by_identity(weights: Mapping[str, WeightTensor]) -> list[tuple[WeightTensor, list[str]]]:
    """Each weight once, with all its names: a tied head is the embedding."""
    found: dict[int, tuple[WeightTensor, list[str]]] = {}
    for name, weight in weights.items():
        found.setdefault(id(weight), (weight, []))[1].append(name)
    return list(found.values())


def _description(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    """What tokenizer, template and defaults are read from: names and contents."""
    if checkpoint.kind == "gguf":
        yield GGUF_METADATA, metadata_section(checkpoint.path)
        return
    places = [checkpoint.path / name for name in SOURCE_FILES]
    for folder, pattern in SOURCE_FOLDERS.items():
        places += sorted((checkpoint.path / folder).glob(pattern))
    for place in places:
        if place.is_file():
            try:
                content = place.read_bytes()
            except OSError as error:
                raise CheckpointError(f"{place}: cannot be read: {error}") from error
            yield place.relative_to(checkpoint.path).as_posix(), content
