"""What there is to say about a remote engine: where it is, how patient to be, how hard to push."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from steppe.errors import ConfigError

__all__ = ["RemoteConfig"]


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """One remote engine. Times are in seconds; None is no limit.

    ``url`` is the server's, with or without ``/v1``. ``model`` None takes the first one it lists.

    ``connect_timeout`` is for the connection, ``first_byte_timeout`` from the request to the first
    byte of its answer, ``chunk_timeout`` for the silence between two pieces of it (a keep-alive is
    no silence), ``total_timeout`` for everything, retries included.

    At most ``attempts`` tries are made, and only while nothing of the answer has come; the pause
    before try n is drawn from [0, ``retry_pause`` * 2^(n - 1)], or is what the server asks for, up
    to ``most_pause``.

    After ``failures`` faults in a row the server is left alone for ``open_seconds``, twice as long
    each further time up to ``most_open_seconds``; ``probes`` requests then find out whether it is
    back. ``requests_per_minute`` and ``tokens_per_minute`` (prompt and answer) bound what is sent.

    ``extensions`` says that the server takes the fields that open engines have beyond the OpenAI
    API, or at least lets them pass: ``top_k``, ``structured_outputs``, ``return_token_ids`` and so
    on. Without it a request that needs one is refused, and chunks carry text without ids.

    Raises ConfigError naming the field.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    connect_timeout: float = 5.0
    first_byte_timeout: float | None = 120.0
    chunk_timeout: float | None = 60.0
    total_timeout: float | None = None
    attempts: int = 3
    retry_pause: float = 0.25
    most_pause: float = 10.0
    failures: int = 5
    open_seconds: float = 5.0
    most_open_seconds: float = 60.0
    probes: int = 1
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    extensions: bool = True

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("url", f"{self.url!r} is not like http://10.0.0.2:8000")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError("url", "has a user, a query or a fragment: give keys as api_key")
        for name in ("attempts", "failures", "probes"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, not {getattr(self, name)}")
        for name in (
            "connect_timeout",
            "first_byte_timeout",
            "chunk_timeout",
            "total_timeout",
            "open_seconds",
            "requests_per_minute",
            "tokens_per_minute",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(name, f"must be more than 0, not {value}")
        for name in ("retry_pause", "most_pause"):
            if not getattr(self, name) >= 0:
                raise ConfigError(name, f"must be at least 0, not {getattr(self, name)}")
        if not self.most_open_seconds >= self.open_seconds:
            raise ConfigError("most_open_seconds", "must be at least open_seconds")

    @property
    def base(self) -> str:
        """The address that paths like ``/completions`` are added to."""
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"
