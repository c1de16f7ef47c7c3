"""A model hub on disk, in the hub client's place."""

from __future__ import annotations

import fnmatch
import importlib
import shutil
from typing import TYPE_CHECKING, Any

import huggingface_hub
from huggingface_hub import errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

# The client's HTTP library, which is another one in other versions of the client.
http = importlib.import_module(errors.HfHubHTTPError.__bases__[0].__module__.partition(".")[0])


class DiskHub:
    """Stands in for the two calls that `steppe.formats.hub` makes.

    ``remote`` is what the hub has (``org/repo`` folders), ``local`` the client's cache. With
    ``failure`` set, every request raises it. ``requested`` lists the files fetched from the hub.
    """

    def __init__(self, remote: Path, local: Path) -> None:
        self.remote = remote
        self.local = local
        self.failure: Exception | None = None
        self.requested: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hub = self

        class Api:
            def list_repo_files(self, repo_id: str) -> list[str]:
                return hub.list_repo_files(repo_id)

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def add(self, repository: str, *files: str, content: bytes = b"") -> None:
        for file in files:
            path = self.remote / repository / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def list_repo_files(self, repository: str) -> list[str]:
        if self.failure is not None:
            raise self.failure
        return files_below(self.remote / repository)

    def snapshot_download(
        self,
        repository: str,
        *,
        allow_patterns: Sequence[str],
        ignore_patterns: Sequence[str] = (),
        local_files_only: bool = False,
    ) -> str:
        snapshot = self.local / repository
        try:
            remote = [] if local_files_only else self.list_repo_files(repository)
        except (OSError, http.HTTPError) as error:
            if not snapshot.is_dir():
                raise errors.LocalEntryNotFoundError("no snapshot") from error
        else:
            for file in remote:
                if matches(file, allow_patterns) and not matches(file, ignore_patterns):
                    target = snapshot / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(self.remote / repository / file, target)
                    self.requested.append(file)
        if not snapshot.is_dir():
            raise errors.LocalEntryNotFoundError("no snapshot")
        return str(snapshot)


def files_below(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def matches(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> Any:
    """An error as the client raises it for a response of this status."""
    request = http.Request("GET", "http://hub.invalid/api/models/org/repo")
    return kind("refused", response=http.Response(status, request=request))
