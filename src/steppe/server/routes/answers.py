"""What the OpenAI routes have in common: ids, usage, and the frame of a stream."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from steppe import __version__
from steppe.errors import SteppeError
from steppe.request import FinishReason, Usage
from steppe.server.errors import dump, openai_envelope
from steppe.server.generation import problem_for, total_usage
from steppe.server.sse import DONE, event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from steppe.server.generation import Run
    from steppe.streaming import StreamChunk

__all__ = ["FINGERPRINT", "Head", "JSONAnswer", "openai_events", "usage_object"]

FINGERPRINT = f"steppe-{__version__}"

Head = dict[str, Any]
"""The fields that every object of one answer begins with."""


class JSONAnswer(Response):
    """A JSON body, written as ``dump`` does."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return dump(content)


def head(prefix: str, kind: str, model: str) -> Head:
    """The head of a new answer, with an id of our own."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts as the OpenAI API names them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


async def openai_events(
    run: Run,
    first: Head,
    choices: Callable[[int, StreamChunk], Iterator[dict[str, Any]]],
    *,
    include_usage: bool,
) -> AsyncGenerator[bytes]:
    """A stream: an event for each choice object that ``choices`` makes of a chunk, then the usage
    if it was asked for, or the error that ended it, and ``[DONE]``.
    """
    frame: Head = {**first, "usage": None} if include_usage else first
    usages: list[Usage] = []
    chunks = run.chunks()
    try:
        async for index, chunk in chunks:
            if chunk.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
                continue  # no choice ends like that: the error that follows says how
            if chunk.usage is not None:
                usages.append(chunk.usage)
            # What one chunk amounts to is written in one piece.
            data = b"".join(
                [event({**frame, "choices": [choice]}) for choice in choices(index, chunk)]
            )
            if data:
                yield data
        if include_usage:
            yield event({**first, "choices": [], "usage": usage_object(total_usage(usages))})
    except SteppeError as error:
        yield event(openai_envelope(problem_for(run.serving, error)))
    finally:
        await chunks.aclose()
    yield DONE
