"""The model hub, through ``huggingface_hub``: what a repository holds, and fetching it.

The library keeps its own cache (``HF_HOME``) and asks the hub first; when the hub cannot be
reached, what is cached is used, as its own loaders do.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.errors import ModelNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["fetch_files", "list_files"]


def _transport_errors() -> tuple[type[Exception], ...]:
    """What a failed request raises.

    The client's HTTP library differs between its versions; the base of that library's errors is a
    base of ``HfHubHTTPError`` in all of them. ``OSError`` is no network, or no disk.
    """
    from huggingface_hub.errors import HfHubHTTPError

    bases = [base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)]
    return (*bases, OSError)


@contextmanager
def _hub_errors(repository: str, offline: bool) -> Iterator[None]:
    """Turn every failure of the hub client into a `ModelNotFoundError` with a sentence."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{repository}: the repository is gated; accept its terms on the hub and log in "
            "(hf auth login)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{repository}: there is no such repository on the hub, or it is private"
        ) from error
    except errors.EntryNotFoundError as error:
        place = "is not in the local hub cache" if offline else "cannot be fetched from the hub"
        raise ModelNotFoundError(f"{repository}: the model {place}: {error}") from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{repository}: no repository can have this name") from error
    except _transport_errors() as error:
        raise ModelNotFoundError(
            f"{repository}: the hub cannot be reached and the model is not in its local cache: "
            f"{error}"
        ) from error


def list_files(repository: str, *, offline: bool) -> list[str]:
    """Paths of the files in ``repository``, from the hub, or of the cached ones if that fails.

    Raises `ModelNotFoundError` if neither knows it.
    """
    import huggingface_hub

    with _hub_errors(repository, offline):
        if offline:
            return _cached_files(repository)
        try:
            return sorted(huggingface_hub.HfApi().list_repo_files(repository))
        except huggingface_hub.errors.RepositoryNotFoundError:
            raise
        except _transport_errors() as error:
            try:
                return _cached_files(repository)
            except huggingface_hub.errors.LocalEntryNotFoundError:
                raise error from None


def _cached_files(repository: str) -> list[str]:
    import huggingface_hub

    # No pattern, no file: the answer is where the snapshot is, whatever of it is there.
    root = Path(
        huggingface_hub.snapshot_download(repository, allow_patterns=[], local_files_only=True)
    )
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def fetch_files(repository: str, patterns: Sequence[str], *, offline: bool) -> Path:
    """The snapshot directory of ``repository`` with the files that match ``patterns`` in it.

    Files in folders are fetched only for patterns that name a folder. Raises `ModelNotFoundError`.
    """
    import huggingface_hub

    ignored = [] if any("/" in pattern for pattern in patterns) else ["*/*"]
    with _hub_errors(repository, offline):
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                allow_patterns=list(patterns),
                ignore_patterns=ignored,
                local_files_only=offline,
            )
        )
