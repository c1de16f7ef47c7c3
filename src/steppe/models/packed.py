"""The parameters of an engine directory, as a program wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.backends.stored import PackedTensor
from steppe.errors import EngineDirectoryError
from steppe.formats.mapped import release_pages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from steppe.formats.engine_directory import EngineDirectory

__all__ = ["packed_weights"]


def packed_weights(
    engine: EngineDirectory, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, PackedTensor]:
    """The directory's weights by name; one under several names is one object.

    Raises `EngineDirectoryError` if a parameter is missing, left over or of another shape.
    """
    origin = str(engine.weights.path.parent)
    found: dict[str, PackedTensor] = {}
    for entry in engine.entries:
        tensor = PackedTensor(
            name=entry.names[0],
            shape=entry.shape,
            layout=engine.layout,
            format=entry.format,
            data=entry.data,
            checksum=entry.checksum,
            origin=origin,
            drop=release_pages,
        )
        found.update(dict.fromkeys(entry.names, tensor))
    wrong = [name for name in {**shapes, **found} if _shape(found, name) != shapes.get(name)]
    if wrong:
        raise EngineDirectoryError(
            f"{origin}: {wrong[0][:100]} is missing, unknown or of another shape than the model "
            f"wants, with {len(wrong) - 1} others; rebuild it with steppe build"
        )
    return found


def _shape(found: Mapping[str, PackedTensor], name: str) -> tuple[int, ...] | None:
    return found[name].shape if name in found else None
