"""Computed prefixes as a file: a header that says what they are of, then the pages' bytes.

8 bytes   "STEPPEKV"
8 bytes   length of the header, little endian
header    JSON: schema, layout, prefixes (tokens, pages of each group), digest of the payload
payload   pages, prefix by prefix, group by group
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steppe.errors import CacheFileError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

__all__ = ["SavedPrefix", "read_prefixes", "write_prefixes"]

MAGIC = b"STEPPEKV"
SCHEMA = 1
MAX_HEADER = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class SavedPrefix:
    """Tokens of whole pages, and each group's pages as uint8[n, page_bytes]."""

    tokens: tuple[int, ...]
    pages: Sequence[npt.NDArray[np.uint8]]


def write_prefixes(
    path: Path, layout: Mapping[str, object], prefixes: Sequence[SavedPrefix]
) -> None:
    """Write a file in one go: readers find the old one or the new one. Raises OSError."""
    digest = blake2b(digest_size=32)
    for prefix in prefixes:
        for pages in prefix.pages:
            digest.update(np.ascontiguousarray(pages).data)
    header = {
        "schema": SCHEMA,
        "layout": layout,
        "prefixes": [
            {"tokens": list(one.tokens), "pages": [pages.shape for pages in one.pages]}
            for one in prefixes
        ],
        "digest": digest.hexdigest(),
    }
    text = json.dumps(header).encode()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + len(text).to_bytes(8, "little") + text)
            for prefix in prefixes:
                for pages in prefix.pages:
                    file.write(np.ascontiguousarray(pages).data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_prefixes(path: Path, layout: Mapping[str, object]) -> list[SavedPrefix]:
    """Every prefix of a file that was made under the same layout.

    Raises CacheFileError saying what is broken, or what is of another model or layout; OSError.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CacheFileError(f"{path} holds no computed prefixes")
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, MAX_HEADER))
        payload = file.read()
    try:
        header: dict[str, Any] = json.loads(text)
        schema, theirs, digest = header["schema"], header["layout"], header["digest"]
        parts = [
            (tuple(map(int, one["tokens"])), [(int(n), int(size)) for n, size in one["pages"]])
            for one in header["prefixes"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise CacheFileError(f"{path} has a broken header") from error
    if schema != SCHEMA:
        raise CacheFileError(f"{path} is of schema {schema}, not {SCHEMA}")
    ours = json.loads(json.dumps(layout))
    for name in ours:
        if theirs.get(name) != ours[name]:
            raise CacheFileError(
                f"{path} was made with another {name}: {theirs.get(name)}, not {ours[name]}"
            )
    if blake2b(payload, digest_size=32).hexdigest() != digest:
        raise CacheFileError(f"{path} is damaged: its pages do not match their digest")
    prefixes, at = [], 0
    for tokens, shapes in parts:
        pages = []
        for (count, size), expected in zip(shapes, ours["page_bytes"], strict=True):
            if size != expected or count < 0 or at + count * size > len(payload):
                raise CacheFileError(f"{path} has a broken header")
            pages.append(np.frombuffer(payload, np.uint8, count * size, at).reshape(count, size))
            at += count * size
        prefixes.append(SavedPrefix(tokens, pages))
    return prefixes
