"""Short words for engine tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.testing import scripted_token

if TYPE_CHECKING:
    from steppe.engine import RequestEngine, RequestHandle
    from steppe.streaming import StreamChunk

REQUEST_FIELDS = {
    "stream_channel",
    "task",
    "caller",
    "priority",
    "queue_timeout",
    "first_token_timeout",
    "timeout",
}


def ask(max_tokens: int | None = 4, prompt: int = 3, **fields: Any) -> LLMGenerationRequest:
    """A request with a prompt of that many tokens; further fields of request or parameters."""
    own = {name: fields.pop(name) for name in list(fields) if name in REQUEST_FIELDS}
    params = SamplingParams(max_tokens=max_tokens, **fields)
    return LLMGenerationRequest(list(range(1, prompt + 1)), params=params, **own)


def run(engine: RequestEngine, limit: int = 100_000) -> int:
    """Tick until nothing is left to do; how many ticks that took."""
    for count in range(limit):
        if not engine.tick():
            return count
    raise AssertionError(f"still busy after {limit} ticks")


def tick(engine: RequestEngine, count: int = 1) -> None:
    """So many boundaries."""
    for _ in range(count):
        engine.tick()


def chunks(handle: RequestHandle) -> list[StreamChunk]:
    """What its stream holds now."""
    found = []
    while (chunk := handle.stream.try_pop()) is not None:
        found.append(chunk)
    return found


def expected(request_id: int, count: int) -> tuple[int, ...]:
    """The tokens that the default script gives a sequence."""
    return tuple(scripted_token(request_id, position) for position in range(count))
