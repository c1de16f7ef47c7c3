"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``: Anthropic's API."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from steppe.errors import SteppeError
from steppe.request import FinishReason
from steppe.server.errors import ENVELOPES, Problem
from steppe.server.generation import model_named, problem_for, serving_of
from steppe.server.interpretation import arguments_of
from steppe.server.protocol.chat import template_messages
from steppe.server.protocol.messages import CountTokensRequest, MessagesRequest
from steppe.server.routes.answers import JSONAnswer
from steppe.server.routes.chat import start_chat
from steppe.server.routes.streams import streamed
from steppe.server.sse import event
from steppe.text.tools.calls import joined_calls

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator

    from steppe.request import Usage
    from steppe.server.generation import Run
    from steppe.server.interpretation import AnswerPart, AnswerReader

__all__ = ["anthropic_envelope", "router"]

router = APIRouter()

PREFIX = "/v1/messages"
PING = event({"type": "ping"}, "ping")
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_envelope(problem: Problem) -> dict[str, Any]:
    """The error object of Anthropic's API, which has no ``param`` and no ``code``."""
    other = "api_error" if problem.status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(problem.status, other)
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


ENVELOPES[PREFIX] = anthropic_envelope


@router.post(PREFIX, response_class=JSONAnswer)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    serving = serving_of(request)
    model = model_named(serving, body.model)
    chat = body.chat()
    names = {} if body.stop_sequences is None else {"stop": "stop_sequences"}
    started = await start_chat(serving, request, chat, names, resumable=bool(body.stream))
    reader = started.answers.reader()
    message = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
    }
    if body.stream:
        events = _events(started.run, message, reader, len(started.prompt))
        return streamed(request, started.run, events, ping=PING)
    (response,) = await started.run.responses()
    (output,) = response.outputs
    parts = [*reader.push(output.text), *reader.finish(output.finish_reason)]
    reason = reader.finish_reason(output.finish_reason)
    return JSONAnswer(
        {
            **message,
            "content": _blocks(parts),
            **_end(reason, output.stop_reason),
            "usage": _usage(response.usage),
        }
    )


@router.post(f"{PREFIX}/count_tokens", response_class=JSONAnswer)
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """How many tokens a conversation is, with its tools, as the chat template renders it."""
    serving = serving_of(request)
    model_named(serving, body.model)
    chat = body.chat()
    ids = await serving.client.encode_chat(
        template_messages(chat.messages),
        tools=chat.template_tools(),
        variables=chat.template_variables(),
    )
    return JSONAnswer({"input_tokens": len(ids)})


def _pieces(parts: Iterable[AnswerPart]) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """(block, delta) of each part: an empty block of its type, and what is added to it. A call
    begins with the part that has an id.
    """
    for reasoning, content, calls in parts:
        if reasoning:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            yield block, {"type": "thinking_delta", "thinking": reasoning}
        if content:
            yield {"type": "text", "text": ""}, {"type": "text_delta", "text": content}
        for call in calls:
            block = {"type": "tool_use"}
            if call.name:
                block |= {"id": f"toolu_{uuid.uuid4().hex}", "name": call.name}
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            yield {**block, "input": {}}, delta if call.arguments else None


def _blocks(parts: list[AnswerPart]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for block, delta in _pieces(parts):
        if block["type"] == "tool_use":
            if "id" in block:
                blocks.append(block)
            continue
        if not blocks or blocks[-1]["type"] != block["type"]:
            blocks.append(block)
        blocks[-1][block["type"]] += delta[block["type"]] if delta else ""
    calls = joined_calls(call for part in parts for call in part.calls)
    uses = [block for block in blocks if block["type"] == "tool_use"]
    for use, call in zip(uses, calls, strict=True):
        use["input"] = arguments_of(call)
    return blocks


class BlockEvents:
    """Turns the parts of an answer into events: each block begins, grows and ends, in turn."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None

    def __call__(self, parts: Iterable[AnswerPart]) -> Iterator[bytes]:
        """The events of the next parts."""
        for block, delta in _pieces(parts):
            if block["type"] != self._open or "id" in block:
                yield from self.close()
                self._index += 1
                self._open = block["type"]
                yield _event("content_block_start", index=self._index, content_block=block)
            if delta is not None:
                yield _event("content_block_delta", index=self._index, delta=delta)

    def close(self) -> Iterator[bytes]:
        """The end of the block that is open, if one is."""
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
            self._open = None


async def _events(
    run: Run, message: dict[str, Any], reader: AnswerReader, prompt_tokens: int
) -> AsyncGenerator[bytes]:
    blocks = BlockEvents()
    first = {"input_tokens": prompt_tokens, "output_tokens": 0}
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": first}
    yield _event("message_start", message=begun)
    chunks = run.chunks()
    try:
        async for _, chunk in chunks:
            reason = chunk.finish_reason
            if reason in (FinishReason.CANCELLED, FinishReason.ERROR):
                continue  # the error that follows says how it ended
            parts = reader.push(chunk.text)
            if reason is not None:
                parts += reader.finish(reason)
            data = b"".join(blocks(parts))
            if reason is not None and chunk.usage is not None:
                data += b"".join(blocks.close())
                end = _end(reader.finish_reason(reason), chunk.stop_reason)
                data += _event("message_delta", delta=end, usage=_usage(chunk.usage))
                data += _event("message_stop")
            if data:
                yield data
    except SteppeError as error:
        yield event(anthropic_envelope(problem_for(run.serving, error)), "error")
    finally:
        await chunks.aclose()


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _end(reason: str, stop_reason: str | int | None) -> dict[str, Any]:
    """Why a message ended, as Anthropic's API names it."""
    if reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    named = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reason]
    return {"stop_reason": named, "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    """Token counts; what the cache spared is counted apart, as it is there."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
