"""How a server is run: names, keys and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steppe.errors import ConfigError
from steppe.server.hosts import is_host

__all__ = ["ServerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Everything about a server that is no property of the engine. Times are in seconds.

    ``served_names`` are the model names that requests may use; none means the model's own.
    Without ``api_keys`` everybody may ask. ``cors_origins`` are the web origins whose pages may,
    none by default. ``allowed_hosts`` are the names it answers to beside localhost and addresses,
    ``*`` for any. ``max_prompt_tokens`` is a limit below the context. A body must arrive within
    ``body_timeout``; a reader that takes nothing for ``write_timeout`` is given up. A silent
    stream gets a comment line every ``ping_interval``. ``queue_timeout`` and ``request_timeout``
    bound each request's wait and its whole life. A stream may outlive its connection for at most
    ``max_resume``, 0 for none, with ``resume_buffer`` bytes kept of it. A shutdown cancels what
    still runs after ``drain_timeout``.

    Raises ConfigError naming the field.
    """

    served_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20
    max_prompt_tokens: int | None = None
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    ping_interval: float = 15.0
    queue_timeout: float | None = None
    request_timeout: float | None = None
    max_resume: float = 300.0
    resume_buffer: int = 256 * 2**10
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_prompt_tokens", "resume_buffer"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value < 1):
                raise ConfigError(name, f"must be at least 1, not {value!r}")
        for name in ("body_timeout", "write_timeout", "ping_interval"):
            self._check_seconds(name, getattr(self, name))
        for name in ("queue_timeout", "request_timeout"):
            if getattr(self, name) is not None:
                self._check_seconds(name, getattr(self, name))
        for name in ("drain_timeout", "max_resume"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(name, "must be 0 seconds or more")
        if any(not key or not key.isascii() for key in self.api_keys):
            raise ConfigError("api_keys", "a key must be ASCII text, and not empty")
        if not all(is_host(name) for name in self.allowed_hosts):
            raise ConfigError("allowed_hosts", "a host is a name without a port, or *")
        if any(not name for name in self.served_names):
            raise ConfigError("served_names", "a name must not be empty")

    @staticmethod
    def _check_seconds(name: str, value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(name, f"must be more than 0 seconds, not {value!r}")
