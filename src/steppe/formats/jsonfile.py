"""JSON of a checkpoint, read with suspicion."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

from steppe.errors import CheckpointError, ModelNotFoundError
from steppe.formats.mapped import shorten

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["parse_object", "read_object"]

# Configurations are kilobytes; the index of a thousand-shard model is a few megabytes.
_MAX_BYTES: Final = 64 << 20


def parse_object(raw: bytes | memoryview, what: str) -> dict[str, Any]:
    """The JSON object in ``raw`` (UTF-8). ``what`` names it in errors.

    Raises `CheckpointError` if it is no valid JSON object, nests too deep, or repeats a key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise CheckpointError(f"{what}: the key {shorten(key)} occurs twice")
            result[key] = value
        return result

    try:
        value = json.loads(str(raw, "utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: a JSON object is expected, not {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at ``path``.

    Raises `ModelNotFoundError` if there is no such file, else as `parse_object`.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # One byte more than there should be, so that a file that lies about itself is noticed.
            raw = file.read(min(size, _MAX_BYTES) + 1)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path}: no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if len(raw) > min(size, _MAX_BYTES):
        raise CheckpointError(f"{path}: longer than {min(size, _MAX_BYTES)} bytes")
    return parse_object(raw, str(path))
