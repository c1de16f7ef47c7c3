"""Every exception Steppe raises, in one tree.

    SteppeError
    ├── InvalidRequestError (ValueError)      the caller's input is wrong; .field names the culprit
    │   ├── UnsupportedRequestError           well-formed, but this deployment can never serve it
    │   └── ContextLengthError                prompt and limits do not fit the context
    ├── ConfigError (ValueError)              a setting is out of range; .field names it
    ├── SubmitError (RuntimeError)            refused now, try again later; .reason says why
    │   ├── BackpressureError                 a replica has no place for it: another may have
    │   └── EngineFailedError                 the engine is dead; chained from what killed it
    ├── RequestCancelledError (RuntimeError)  outcome: somebody cancelled the request
    ├── RequestFailedError (RuntimeError)     outcome: the request died during execution
    │   ├── DeadlineExceededError             outcome: one of its time limits passed
    │   └── ReplicaError                      outcome: the replica that ran it let it down
    │       ├── ReplicaLostError              its process or machine is gone
    │       │   └── LoadTimeoutError          it took too long to load, and was ended
    │       ├── NetworkError                  the connection broke, or the answer made no sense
    │       ├── UpstreamError                 a remote engine answered with an error; .status
    │       ├── UpstreamTimeoutError          a remote engine was silent too long; .which
    │       ├── RateLimitedError              a remote engine asks to slow down; .retry_after
    │       ├── CircuitOpenError              a remote engine failed too often to be asked now
    │       ├── CredentialsError              a remote engine does not take our credentials
    │       └── ContentFilteredError          a remote engine declined for what was said
    ├── ExecutionError (RuntimeError)         a step or an admission failed inside the runtime
    │   └── ExecutionLostError                the execution cannot run another step, ever
    ├── ModelError (ValueError)               a model reference or checkpoint cannot be used
    │   ├── ModelNotFoundError                the reference names nothing that exists
    │   ├── CheckpointError                   a file is truncated, corrupt or inconsistent
    │   │   └── EngineDirectoryError          an engine directory has to be built again
    │   ├── UnsupportedModelError             an architecture, tensor type or packing we do not run
    │   ├── TokenizerError                    no usable tokenizer, or one we refuse to guess at
    │   └── ChatTemplateError                 the chat template is missing, broken or said no
    ├── CacheFileError (ValueError)           saved prefixes are damaged, or of another model
    └── BackendError (RuntimeError)           the backend is missing, or cannot do what was asked

Errors that a caller can mend derive from ``ValueError`` as well, transient ones from
``RuntimeError``. HTTP status codes are the server's business and are not stated here.

Two class attributes say what may be done about an error (seed 003). ``retryable``: the same
request, of which no chunk has been delivered, may succeed elsewhere or later. ``blames_replica``:
it speaks against the health of whoever ran the request, so a circuit breaker counts it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

__all__ = [
    "BackendError",
    "BackpressureError",
    "CacheFileError",
    "ChatTemplateError",
    "CheckpointError",
    "CircuitOpenError",
    "ConfigError",
    "ContentFilteredError",
    "ContextLengthError",
    "CredentialsError",
    "DeadlineExceededError",
    "EngineDirectoryError",
    "EngineFailedError",
    "ExecutionError",
    "ExecutionLostError",
    "InvalidRequestError",
    "LoadTimeoutError",
    "ModelError",
    "ModelNotFoundError",
    "NetworkError",
    "RateLimitedError",
    "ReplicaError",
    "ReplicaLostError",
    "RequestCancelledError",
    "RequestFailedError",
    "SteppeError",
    "SubmitError",
    "SubmitRefusal",
    "TokenizerError",
    "UnsupportedModelError",
    "UnsupportedRequestError",
    "UpstreamError",
    "UpstreamTimeoutError",
]

SubmitRefusal = Literal["queue_full", "backlog_full", "shutting_down", "failed", "unavailable"]
"""``unavailable``: no replica is ready, and one may be soon."""


class SteppeError(Exception):
    """Base of every exception this package raises on purpose."""

    retryable: ClassVar[bool] = False
    blames_replica: ClassVar[bool] = False


class InvalidRequestError(SteppeError, ValueError):
    """A request field is missing, malformed or out of range. ``field`` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UnsupportedRequestError(InvalidRequestError):
    """A well-formed request that this engine or model can never serve."""


class ContextLengthError(InvalidRequestError):
    """The prompt, with what it must leave room for, does not fit the context.

    ``needed`` and ``available`` are token counts.
    """

    def __init__(self, field: str, message: str, *, needed: int, available: int) -> None:
        super().__init__(field, message)
        self.needed = needed
        self.available = available


class ConfigError(SteppeError, ValueError):
    """A setting of an engine is malformed or out of range. ``field`` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class SubmitError(SteppeError, RuntimeError):
    """``submit()`` refused the request outright. Nothing was queued; trying later may work."""

    retryable = True

    def __init__(self, reason: SubmitRefusal, message: str) -> None:
        super().__init__(message)
        self.reason: SubmitRefusal = reason


class BackpressureError(SubmitError):
    """A replica is full: ``max_concurrent`` (``backlog_full``) or its mailbox (``queue_full``)."""


class EngineFailedError(SubmitError):
    """The engine has failed for good. ``__cause__`` is what killed it."""

    def __init__(self, message: str) -> None:
        super().__init__("failed", message)


class RequestCancelledError(SteppeError, RuntimeError):
    """The request was cancelled before it completed."""


class RequestFailedError(SteppeError, RuntimeError):
    """The request failed during execution; the message says how."""


class DeadlineExceededError(RequestFailedError):
    """A time limit of the request passed: ``which`` is ``queue``, ``first_token`` or ``total``."""

    def __init__(self, which: str, message: str) -> None:
        super().__init__(message)
        self.which = which


class ReplicaError(RequestFailedError):
    """The replica that ran the request let it down."""


class ReplicaLostError(ReplicaError):
    """The process or the machine behind the replica is gone, and what it had begun with it."""

    retryable = True
    blames_replica = True


class LoadTimeoutError(ReplicaLostError):
    """The replica's engine took too long to load, and was ended."""


class NetworkError(ReplicaError):
    """The connection to a remote engine broke, or what came over it made no sense."""

    retryable = True
    blames_replica = True


class UpstreamError(ReplicaError):
    """A remote engine answered with an error of its own. ``status`` is the HTTP status."""

    retryable = True
    blames_replica = True

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class UpstreamTimeoutError(ReplicaError):
    """A remote engine was silent for too long.

    ``which`` is ``connect``, ``first_byte``, ``between_chunks`` or ``total``.
    """

    retryable = True
    blames_replica = True

    def __init__(self, which: str, message: str) -> None:
        super().__init__(message)
        self.which = which


class RateLimitedError(ReplicaError):
    """A remote engine asks to slow down: ``retry_after`` seconds, where it says how long."""

    retryable = True

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class CircuitOpenError(ReplicaError):
    """A remote engine failed too often and is left alone for ``retry_after`` seconds more."""

    retryable = True

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class CredentialsError(ReplicaError):
    """A remote engine does not accept our credentials. ``status`` is 401 or 403."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class ContentFilteredError(ReplicaError):
    """A remote engine declined because of what was said."""


class ExecutionError(SteppeError, RuntimeError):
    """A runtime operation failed. Its batch is lost, the runtime is not."""


class ExecutionLostError(ExecutionError):
    """The execution lost something it cannot do without (a device, a peer rank)."""


class ModelError(SteppeError, ValueError):
    """A model cannot be used; the message names the file or field."""


class ModelNotFoundError(ModelError):
    """A model reference that leads nowhere."""


class CheckpointError(ModelError):
    """A checkpoint file is truncated, corrupt or contradicts itself."""


class EngineDirectoryError(CheckpointError):
    """An engine directory is of another version or layout, damaged or incomplete, or cannot be
    written where it was asked for.
    """


class UnsupportedModelError(ModelError):
    """An architecture, a tensor type or a weight packing this version does not run."""


class TokenizerError(ModelError):
    """The checkpoint has no usable tokenizer, or one we refuse to guess at."""


class ChatTemplateError(ModelError):
    """There is no chat template, it does not compile, or it refused the conversation."""


class CacheFileError(SteppeError, ValueError):
    """A file of computed prefixes is damaged, or was made with another model or memory layout."""


class BackendError(SteppeError, RuntimeError):
    """A backend is not installed, or cannot do what was asked of it."""
