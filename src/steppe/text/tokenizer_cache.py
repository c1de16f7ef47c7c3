"""The cache of converted tokenizers, and the one place that parses a ``tokenizer.json``.

Turning a GGUF vocabulary into a tokenizer costs up to seconds; reading the result back does not.
An entry is named by the checkpoint's identity and our format version, and starts with a line that
holds a checksum of the rest, so that a damaged entry is rebuilt and never half believed. A cache
directory that cannot be read or written is the same as no cache.

An entry holds the library's JSON without its merges, which follow as pairs of token ids: handing
a vocabulary and merges over as Python objects takes less than half the time of the library's own
parser.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from steppe.errors import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FORMAT_VERSION", "cached_core", "parse_core"]

FORMAT_VERSION = 1
"""Raised whenever a conversion rule changes, so that entries of the old rules are not found."""

_MODEL_OPTIONS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
_ADDED_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def parse_core(data: bytes, source: str) -> Tokenizer:
    """A tokenizer from the bytes of a ``tokenizer.json``; ``TokenizerError`` naming ``source``."""
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # boundary: the library reports every parse failure as this type
        raise TokenizerError(f"{source} is not a usable tokenizer.json: {error}") from error


def cached_core(cache_dir: Path | None, identity: str, build: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer cached under ``identity``, or the one ``build`` makes, which is then cached.

    ``build`` makes a BPE tokenizer whose ids have no holes. Safe between processes and threads: an
    entry appears by an atomic rename, complete or not at all.
    """
    if cache_dir is None:
        return build()
    # Another version of the library may build or save the same vocabulary differently.
    key = f"{tokenizers.__version__} {identity}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    path = Path(cache_dir) / f"tokenizer-v{FORMAT_VERSION}-{name}"
    core = _read(path)
    if core is None:
        core = build()
        _write(path, _pack(core))
    return core


def _pack(core: Tokenizer) -> bytes:
    state = json.loads(core.to_str())
    model = state["model"]
    vocab = model.pop("vocab")
    merges = model.pop("merges")
    state["tokens"] = sorted(vocab, key=vocab.__getitem__)
    text = json.dumps(state, ensure_ascii=False).encode()
    pairs = np.array([(vocab[left], vocab[right]) for left, right in merges], "<u4")
    return b"%d\n" % len(text) + text + pairs.tobytes()


def _unpack(body: bytes) -> Tokenizer:
    size, _, rest = body.partition(b"\n")
    state = json.loads(rest[: int(size)])
    tokens: list[str] = state.pop("tokens")
    added: list[dict[str, object]] = state["added_tokens"]
    saved = state["model"]
    options = {name: saved[name] for name in _MODEL_OPTIONS if saved.get(name) is not None}
    pairs = np.frombuffer(rest, "<u4", offset=int(size)).reshape(-1, 2)
    left, right = pairs[:, 0].tolist(), pairs[:, 1].tolist()
    model = BPE(
        dict(zip(tokens, range(len(tokens)), strict=True)),
        [(tokens[a], tokens[b]) for a, b in zip(left, right, strict=True)],
        **options,
    )
    # The steps around the model are the library's to parse; a model with no tokens costs nothing.
    frame = {**state, "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    core = Tokenizer.from_str(json.dumps(frame))
    core.model = model
    core.add_tokens(
        [
            AddedToken(str(token["content"]), **{name: token[name] for name in _ADDED_OPTIONS})
            for token in added
        ]
    )
    return core


def _read(path: Path) -> Tokenizer | None:
    try:
        header, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return _unpack(body) if header == _header(body) else None


def _write(path: Path, body: bytes) -> None:
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = Path(file.name)
            file.write(_header(body) + b"\n" + body)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()


def _header(body: bytes) -> bytes:
    return b"steppe-tokenizer %d %08x %d" % (FORMAT_VERSION, zlib.crc32(body), len(body))
