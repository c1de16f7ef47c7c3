"""What an OpenAI-compatible server answers, as the chunks and errors of seed 003.

A server is not trusted: what makes no sense is a NetworkError, never a crash.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from steppe.errors import (
    ContentFilteredError,
    CredentialsError,
    InvalidRequestError,
    NetworkError,
    RateLimitedError,
    SteppeError,
    UpstreamError,
)
from steppe.replicas.vocabulary import TokenChunk
from steppe.request import FinishReason, TokenLogprob, Usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["StreamReader", "embedding_of", "error_of", "retry_after_of"]

MAX_MESSAGE = 500
FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
REFUSED = (400, 413, 422)
"""The request is wrong, and would be elsewhere."""


class StreamReader:
    """Turns the events of one answer into chunks. ``n`` is how many sequences were asked for.

    The chunk that ends the request is held back until the usage has come, which belongs on it.
    """

    def __init__(self, n: int, *, logprobs: bool) -> None:
        self._open = set(range(n))
        self._logprobs = logprobs
        self._last: TokenChunk | None = None
        self._usage: Usage | None = None

    def take(self, data: str) -> Iterator[TokenChunk]:
        """The chunks that an event brings. Raises NetworkError, or the error it tells of."""
        event = _parsed(data)
        if event.get("error") is not None:
            raise error_of(None, event)
        if (usage := event.get("usage")) is not None:
            self._usage = _usage(usage)
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise NetworkError("an event has no choices")
        for choice in choices:
            chunk = self._chunk(choice)
            if chunk is None:
                continue
            if chunk.finished and not self._open:
                self._last = chunk
            else:
                yield chunk

    def end(self) -> TokenChunk:
        """The chunk that ends the request, once the stream has. Raises NetworkError."""
        if self._last is None:
            raise NetworkError("the answer ended before its end")
        if self._usage is None:
            raise NetworkError("the server does not say how many tokens it used")
        return replace(self._last, usage=self._usage)

    def _chunk(self, choice: object) -> TokenChunk | None:
        if not isinstance(choice, dict):
            raise NetworkError("a choice is no object")
        index = choice.get("index", 0)
        if index not in self._open:
            if isinstance(index, int) and self._last is not None:
                return None  # goes on after its end
            raise NetworkError(f"sequence {index!r} is none of those that are open")
        text = choice.get("text")
        if text is None:
            delta = choice.get("delta") or {}
            text = (delta.get("content") if isinstance(delta, dict) else None) or ""
        if not isinstance(text, str):
            raise NetworkError("a text is no text")
        finish = self._finish(choice.get("finish_reason"))
        ids = _ids(choice.get("token_ids") or ())
        logprobs = None
        if self._logprobs and choice.get("logprobs") is not None:
            logprobs = _logprobs(choice["logprobs"])
            ids = ids or tuple(one.token_id for one in logprobs)
        if finish is None:
            if not text and not ids:
                return None
            return TokenChunk(index, text, ids, logprobs)
        self._open.discard(index)
        stop = choice.get("stop_reason")
        return TokenChunk(
            index, text, ids, logprobs, True, finish, stop if isinstance(stop, str | int) else None
        )

    @staticmethod
    def _finish(reason: object) -> FinishReason | None:
        if reason is None:
            return None
        if reason == "content_filter":
            raise ContentFilteredError("the remote engine declined to go on")
        if reason == "cancelled":
            raise UpstreamError("the remote engine cancelled the request", status=200)
        if not isinstance(reason, str) or reason not in FINISHES:
            raise NetworkError(f"{reason!r} is no reason to end")
        return FINISHES[reason]


def _parsed(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise NetworkError(f"{data[:60]!r} is not JSON") from None
    if not isinstance(event, dict):
        raise NetworkError(f"{data[:60]!r} is no event")
    return event


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise NetworkError(f"{value!r} is no count of tokens")
    return value


def _usage(usage: object) -> Usage:
    if not isinstance(usage, dict):
        raise NetworkError("the usage is no object")
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens", 0)),
        _count(cached or 0),
    )


def _ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple):
        raise NetworkError("the token ids are no list")
    return tuple(_count(one) for one in ids)


def _logprobs(given: object) -> tuple[TokenLogprob, ...]:
    """Of the completions API, with tokens spelled ``token_id:N``."""
    if not isinstance(given, dict):
        raise NetworkError("the logprobs are no object")
    tokens, values = given.get("tokens"), given.get("token_logprobs")
    tops = given.get("top_logprobs") or ()
    if not isinstance(tokens, list) or not isinstance(values, list) or len(tokens) != len(values):
        raise NetworkError("the logprobs have no tokens")
    found = []
    for i, (token, value) in enumerate(zip(tokens, values, strict=True)):
        token_id, logprob = _token_id(token), _logprob(value)
        top = tops[i] if isinstance(tops, list) and i < len(tops) else {}
        if not isinstance(top, dict):
            raise NetworkError("the top logprobs are no object")
        pairs = {_token_id(name): _logprob(number) for name, number in top.items()}
        pairs.setdefault(token_id, logprob)
        # Sorting is stable: where two are equal, the server's order stands.
        order = sorted(pairs.items(), key=lambda pair: -pair[1])
        found.append(TokenLogprob(token_id, logprob, tuple(order)))
    return tuple(found)


def _token_id(spelled: object) -> int:
    name = spelled.removeprefix("token_id:") if isinstance(spelled, str) else ""
    if not (name.isascii() and name.isdecimal() and len(name) <= 10) or name == spelled:
        raise NetworkError("the server does not name the ids of tokens")
    return int(name)


def _logprob(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NetworkError(f"{value!r} is no logprob")
    return float(value)


def embedding_of(answer: bytes) -> TokenChunk:
    """The only chunk of an embedding. Raises NetworkError."""
    whole = _parsed(answer.decode("utf-8", "replace"))
    data = whole.get("data")
    first = data[0] if isinstance(data, list) and len(data) == 1 else None
    vector = first.get("embedding") if isinstance(first, dict) else None
    if not isinstance(vector, list) or not vector:
        raise NetworkError("the answer has no embedding")
    return TokenChunk(
        0,
        finished=True,
        finish_reason=FinishReason.STOP,
        usage=_usage(whole.get("usage")),
        embedding=tuple(_logprob(one) for one in vector),
    )


def error_of(status: int | None, body: object, *, retry_after: float | None = None) -> SteppeError:
    """What a server's refusal means here. ``status`` None: it came inside a stream.

    ``body`` is what it sent, parsed where it was JSON.
    """
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        error = {"message": error}
    message = str(error.get("message") or "it says no more")[:MAX_MESSAGE]
    code = error.get("code")
    if status is None:
        status = code if isinstance(code, int) else 500
        if error.get("type") == "invalid_request_error":
            status = 400
    message = f"the remote engine answered {status}: {message}"
    if code == "content_filter":
        return ContentFilteredError(message)
    if status in (401, 403):
        return CredentialsError(message, status=status)
    if status == 429:
        return RateLimitedError(message, retry_after=retry_after)
    if status in REFUSED:
        return InvalidRequestError(str(error.get("param") or "request")[:60], message)
    return UpstreamError(message, status=status)


def retry_after_of(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds that a server asks us to wait: milliseconds, seconds or a date (RFC 9110)."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * unit
        except ValueError:
            if name == "retry-after-ms":
                continue
            try:
                date = parsedate_to_datetime(value)
            except ValueError:
                return None
            if date.tzinfo is None:
                date = date.replace(tzinfo=UTC)
            seconds = (date - (now or datetime.now(UTC))).total_seconds()
        if 0 <= seconds < 1e9:
            return seconds
        return 0.0 if seconds < 0 else None
    return None
