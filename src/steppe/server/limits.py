"""Who may ask, and under which label: the outermost layer of the server.

Whatever is refused here, or by the layer that takes the body in, is answered here as well, before
a framework or an engine has heard of it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
import uuid
from typing import TYPE_CHECKING, cast

from starlette.datastructures import Headers

from steppe.server.errors import Problem, ProblemError, dump, envelope

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from steppe.server.hosts import Hosts

__all__ = ["MAX_LABEL", "OPEN_PATHS", "AccessMiddleware", "KeyRing", "caller_of", "request_label"]

logger = logging.getLogger("steppe.server.access")

MAX_LABEL = 128
"""Characters kept of a client's own request id."""
OPEN_PATHS: set[str] = {"/health", "/ready"}
"""Paths that need no key: what a load balancer asks."""


_CALLER = "steppe.caller"


def caller_of(scope: Scope) -> str:
    """Who sent the request with this scope; see ``KeyRing.caller``."""
    return cast("str", scope[_CALLER])


class KeyRing:
    """The accepted API keys. Any thread.

    Every key is compared, in constant time and as a digest, so neither the time taken nor a length
    tells anything about them.
    """

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [_digest(key) for key in keys]

    def caller(self, headers: Headers) -> str | None:
        """Who asks with ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; None for a key that
        we do not know.

        A caller is named by a fingerprint of the key, which is the same after a restart and does
        not give the key away; where no key is needed, everybody is the same caller, ``""``.
        """
        if not self._digests:
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        asked, known = _digest(given), False
        for digest in self._digests:
            known |= hmac.compare_digest(asked, digest)
        return f"key-{hashlib.sha256(asked).hexdigest()[:16]}" if known else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def request_label(headers: Headers) -> str:
    """The client's own id of this request, cut to visible ASCII and ``MAX_LABEL`` characters; a
    fresh one if it sent none. A label is echoed and logged, and identifies nothing.
    """
    given = headers.get("x-request-id", "")[: 4 * MAX_LABEL]
    label = "".join(char for char in given if "!" <= char <= "~")[:MAX_LABEL]
    return label or f"req-{uuid.uuid4().hex}"


class AccessMiddleware:
    """Labels each response, checks names and keys, and answers what the layers outside the app
    refuse.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, hosts: Hosts) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        label = request_label(headers)
        began, status = time.perf_counter(), 0

        async def send_labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", label.encode("ascii")),
                ]
            await send(message)

        try:
            self._hosts.check(headers)
            caller = self._keys.caller(headers)
            scope[_CALLER] = caller or ""
            if caller is None and scope["path"] not in OPEN_PATHS:
                raise ProblemError(
                    Problem(401, "no valid API key", "authentication_error", code="invalid_api_key")
                )
            await self._app(scope, receive, send_labelled)
        except ProblemError as refusal:
            await _answer(refusal.problem, scope["path"], send_labelled)
        finally:
            if logger.isEnabledFor(logging.INFO):
                path, seconds = scope["path"][:200], time.perf_counter() - began
                logger.info("%s %r %d %.3fs %s", scope["method"], path, status, seconds, label)


async def _answer(problem: Problem, path: str, send: Send) -> None:
    body = dump(envelope(problem, path))
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **problem.headers(),
    }
    if problem.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not wanted
    await send(
        {
            "type": "http.response.start",
            "status": problem.status,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
