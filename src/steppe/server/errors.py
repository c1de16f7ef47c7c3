"""The one place where errors become HTTP: status, headers and an envelope.

A ``Problem`` is what a client is told. ``problem_of`` makes one of any exception of the tree in
``steppe.errors``; ``envelope`` puts it into the shape of the API that was called.
"""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from steppe.errors import (
    ChatTemplateError,
    CircuitOpenError,
    ContentFilteredError,
    ContextLengthError,
    DeadlineExceededError,
    EngineFailedError,
    InvalidRequestError,
    ModelError,
    RateLimitedError,
    ReplicaError,
    ReplicaLostError,
    RequestCancelledError,
    RequestFailedError,
    SteppeError,
    SubmitError,
    UnsupportedRequestError,
    UpstreamTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

__all__ = [
    "ENVELOPES",
    "Problem",
    "ProblemError",
    "dump",
    "envelope",
    "naming",
    "openai_envelope",
    "problem_of",
    "validation_problem",
]

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads this status: the client has gone, or asked for the end itself."""
MAX_MESSAGE = 2000


@dataclass(frozen=True, slots=True)
class Problem:
    """What went wrong, as a client is told. ``retry_after`` in seconds, where waiting may help."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    def headers(self) -> dict[str, str]:
        """``Retry-After`` in whole seconds, and in milliseconds for clients that know it."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
            headers["retry-after-ms"] = str(max(1, math.ceil(self.retry_after * 1000)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


class ProblemError(SteppeError):
    """A refusal that only HTTP has: no such model, no such key, a body too large."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def problem_of(
    error: Exception, *, retry_after: float | None = None, stopping: bool = False
) -> Problem:
    """What a client is told about ``error``.

    ``retry_after`` is named where trying later helps. While the server is ``stopping`` a cancelled
    request was cancelled by it.
    """
    message = _text(error)
    match error:
        case ProblemError():
            return error.problem
        case ContextLengthError():
            return Problem(400, message, param=error.field, code="context_length_exceeded")
        case UnsupportedRequestError():
            return Problem(400, message, param=error.field, code="unsupported_value")
        case InvalidRequestError():
            return Problem(400, message, param=error.field, code="invalid_value")
        case ChatTemplateError():
            return Problem(400, message, param="messages", code="chat_template_error")
        case EngineFailedError():
            return Problem(503, message, "server_error", code="engine_failed")
        case SubmitError(reason="shutting_down" | "unavailable"):
            return Problem(503, message, "server_error", None, error.reason, retry_after)
        case SubmitError():
            return Problem(429, message, "rate_limit_error", None, error.reason, retry_after)
        case DeadlineExceededError(which="queue"):
            return Problem(503, message, "server_error", None, "queue_timeout", retry_after)
        case DeadlineExceededError():
            return Problem(504, message, "server_error", code="request_timeout")
        case RequestCancelledError() if stopping:
            return Problem(
                503, "the server is shutting down", "server_error", None, "shutting_down",
                retry_after,
            )  # fmt: skip
        case RequestCancelledError():
            return Problem(CLIENT_CLOSED_REQUEST, message, code="request_cancelled")
        case ReplicaError():
            return _replica_problem(error, message, retry_after)
        case RequestFailedError():
            return Problem(500, message, "server_error", code="generation_failed")
        case ModelError() | SteppeError():
            return Problem(500, message, "server_error", code="internal_error")
        case _:
            return Problem(500, "internal error", "server_error", code="internal_error")


def _replica_problem(error: ReplicaError, message: str, retry_after: float | None) -> Problem:
    """What a client is told when a replica let its request down."""
    match error:
        case RateLimitedError():
            after = retry_after if error.retry_after is None else error.retry_after
            return Problem(429, message, "rate_limit_error", None, "upstream_rate_limited", after)
        case CircuitOpenError():
            return Problem(
                503, message, "server_error", None, "upstream_unavailable", error.retry_after
            )
        case ReplicaLostError():
            return Problem(503, message, "server_error", None, "replica_lost", retry_after)
        case UpstreamTimeoutError():
            return Problem(504, message, "server_error", code="upstream_timeout")
        case ContentFilteredError():
            return Problem(400, message, code="content_filter")
        case _:
            return Problem(502, message, "server_error", code="upstream_error")


def validation_problem(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """What a client is told about a body that does not fit its schema: the first thing wrong."""
    # A field that may be text or a list fails once per shape; the deepest complaint is the closest.
    first = max(errors, key=lambda error: len(error["loc"]))
    kind, message = str(first["type"]), str(first["msg"])
    if kind == "json_invalid":
        detail = (first.get("ctx") or {}).get("error", "")
        return Problem(400, f"the body is not JSON: {detail}", code="invalid_json")
    where = first["loc"]
    param = _param([part for part in where[1:] if not _is_shape(part)])
    if not param:
        return Problem(
            400, "the body must be a JSON object, sent as application/json", code="invalid_body"
        )
    if kind == "extra_forbidden":
        return Problem(400, f"{param}: no such field", param=param, code="unknown_parameter")
    if kind == "missing":
        return Problem(400, f"{param}: is required", param=param, code="missing_required_parameter")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    message = message[:1].lower() + message[1:]
    return Problem(400, f"{param}: {message}"[:MAX_MESSAGE], param=param, code=code)


def _is_shape(part: object) -> bool:
    """Whether a step of a location names a member of a union and not a place in the body."""
    return isinstance(part, str) and (
        "[" in part or part in ("str", "int", "float", "bool", "dict") or part[:1].isupper()
    )


def _param(where: Sequence[object]) -> str:
    name = ""
    for part in where:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    return name


@contextmanager
def naming(**fields: str) -> Generator[None]:
    """Within the block, call fields what this API calls them.

    ``naming(prompt="messages")`` turns a complaint about ``prompt`` into one about ``messages``.
    """
    try:
        yield
    except InvalidRequestError as error:
        head, bracket, rest = error.field.partition("[")
        if head not in fields:
            raise
        problem = problem_of(error)
        field = fields[head] + bracket + rest
        message = problem.message.removeprefix(error.field)
        raise ProblemError(replace(problem, param=field, message=field + message)) from error


# ---- envelopes -----------------------------------------------------------------------------------


def openai_envelope(problem: Problem) -> dict[str, Any]:
    """The error object of the OpenAI API."""
    return {
        "error": {
            "message": problem.message,
            "type": problem.type,
            "param": problem.param,
            "code": problem.code,
        }
    }


ENVELOPES: dict[str, Callable[[Problem], dict[str, Any]]] = {}
"""Path prefixes of other APIs, and the envelopes that their clients expect."""


def envelope(problem: Problem, path: str) -> dict[str, Any]:
    """``problem`` in the shape of the API that ``path`` belongs to."""
    for prefix, shape in ENVELOPES.items():
        if path.startswith(prefix):
            return shape(problem)
    return openai_envelope(problem)


def dump(value: object) -> bytes:
    """Strict, compact JSON. A lone surrogate, which no encoding has, is written as an escape."""
    try:
        return _PLAIN.encode(value).encode()
    except UnicodeEncodeError:
        return _ESCAPED.encode(value).encode()


# Made once: every chunk of every stream is written through them.
_PLAIN = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_ESCAPED = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def _text(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:MAX_MESSAGE]
