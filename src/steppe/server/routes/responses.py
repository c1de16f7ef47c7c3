"""``POST /v1/responses``: OpenAI's newer API. Nothing is stored: a conversation is sent whole."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from steppe.errors import SteppeError
from steppe.request import FinishReason
from steppe.server.generation import model_named, problem_for, serving_of
from steppe.server.interpretation import call_id
from steppe.server.protocol.responses import NamedFunction, ResponsesRequest
from steppe.server.routes.answers import JSONAnswer, head
from steppe.server.routes.chat import start_chat
from steppe.server.routes.streams import streamed
from steppe.server.sse import event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator

    from steppe.request import SamplingParams, Usage
    from steppe.server.interpretation import AnswerPart
    from steppe.server.routes.chat import StartedChat
    from steppe.text.tools.calls import CallPart

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/responses", response_class=JSONAnswer)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    serving = serving_of(request)
    model = model_named(serving, body.model)
    started = await start_chat(
        serving, request, body.chat(), body.names, resumable=bool(body.stream)
    )
    first = _head(body, model, started.params)
    if body.stream:
        return streamed(request, started.run, _events(started, first))
    (response,) = await started.run.responses()
    (output,) = response.outputs
    reader, items = started.answers.reader(), OutputItems()
    parts = [*reader.push(output.text), *reader.finish(output.finish_reason)]
    cut = output.finish_reason is FinishReason.LENGTH
    for _ in (*items.push(parts), *items.close(cut=cut)):
        pass  # nobody listens: only what they leave behind is wanted
    return JSONAnswer({**first, **_end(items, response.usage, cut=cut)})


class OutputItems:
    """Turns the parts of an answer into events, and keeps the ``output`` that they add up to.

    Reasoning and text each are one item that grows, and so is each call.
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._part: dict[str, Any] | None = None  # of the last item, while it grows
        self._calling = False  # whether that is a call

    def push(self, parts: Iterable[AnswerPart]) -> Iterator[dict[str, Any]]:
        """The events of the next parts."""
        for reasoning, content, calls in parts:
            if reasoning:
                yield from self._grow("reasoning", reasoning)
            if content:
                yield from self._grow("message", content)
            for call in calls:
                yield from self._call(call)

    def close(self, *, cut: bool = False) -> Iterator[dict[str, Any]]:
        """The end of the item that grows, if one does; ``cut``: it was not finished."""
        if self._calling:
            yield from self._end_call(complete=False)
        if self._part is None:
            return
        part, item, self._part = self._part, self.output[-1], None
        place = self._place(content_index=0)
        kind = part["type"]
        yield {"type": f"response.{kind}.done", **place, "text": part["text"], **_scores(kind)}
        yield {"type": "response.content_part.done", **place, "part": part}
        item["content"] = [part]
        item["status"] = "incomplete" if cut else "completed"
        yield self._item_event("done")

    def _grow(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._part is None or self.output[-1]["type"] != kind:
            yield from self.close()
            item: dict[str, Any]
            part: dict[str, Any]
            if kind == "message":
                item = {"id": _id("msg"), "type": kind, "role": "assistant"}
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            else:
                item = {"id": _id("rs"), "type": kind, "summary": []}
                part = {"type": "reasoning_text", "text": ""}
            self.output.append({**item, "content": [], "status": "in_progress"})
            yield self._item_event("added")
            place = self._place(content_index=0)
            yield {"type": "response.content_part.added", **place, "part": {**part}}
            self._part = part
        assert self._part is not None
        self._part["text"] += text
        said = self._part["type"]
        place = self._place(content_index=0)
        yield {"type": f"response.{said}.delta", **place, "delta": text, **_scores(said)}

    def _call(self, call: CallPart) -> Iterator[dict[str, Any]]:
        if call.name:
            yield from self.close()
            item = {
                "id": _id("fc"),
                "type": "function_call",
                "call_id": call_id(),
                "name": call.name,
                "arguments": "",
                "status": "in_progress",
            }
            self.output.append(item)
            self._calling = True
            yield self._item_event("added")
        if call.arguments:
            self.output[-1]["arguments"] += call.arguments
            kind = "response.function_call_arguments.delta"
            yield {"type": kind, **self._place(), "delta": call.arguments}
        if call.complete:
            yield from self._end_call(complete=True)

    def _end_call(self, *, complete: bool) -> Iterator[dict[str, Any]]:
        self._calling = False
        item = self.output[-1]
        named = {"name": item["name"], "arguments": item["arguments"]}
        if complete:
            yield {"type": "response.function_call_arguments.done", **self._place(), **named}
        item["status"] = "completed" if complete else "incomplete"
        yield self._item_event("done")

    def _place(self, **more: int) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **more}

    def _item_event(self, what: str) -> dict[str, Any]:
        return {
            "type": f"response.output_item.{what}",
            "output_index": len(self.output) - 1,
            "item": {**self.output[-1]},
        }


async def _events(started: StartedChat, first: dict[str, Any]) -> AsyncGenerator[bytes]:
    number = 0

    def written(one: dict[str, Any]) -> bytes:
        nonlocal number
        numbered = {**one, "sequence_number": number}
        number += 1
        return event(numbered, one["type"])

    reader, items = started.answers.reader(), OutputItems()
    yield written({"type": "response.created", "response": first})
    yield written({"type": "response.in_progress", "response": first})
    chunks = started.run.chunks()
    try:
        async for _, chunk in chunks:
            reason = chunk.finish_reason
            if reason in (FinishReason.CANCELLED, FinishReason.ERROR):
                continue  # the error that follows says how it ended
            parts = reader.push(chunk.text)
            if reason is not None:
                parts += reader.finish(reason)
            data = b"".join([written(one) for one in items.push(parts)])
            if reason is not None and chunk.usage is not None:
                cut = reason is FinishReason.LENGTH
                data += b"".join([written(one) for one in items.close(cut=cut)])
                last = {**first, **_end(items, chunk.usage, cut=cut)}
                data += written({"type": f"response.{last['status']}", "response": last})
            if data:
                yield data
    except SteppeError as error:
        problem = problem_for(started.run.serving, error)
        failure = {"code": "server_error", "message": problem.message}
        failed = {**first, "status": "failed", "output": items.output, "error": failure}
        yield written({"type": "response.failed", "response": failed})
    finally:
        await chunks.aclose()


def _head(body: ResponsesRequest, model: str, params: SamplingParams) -> dict[str, Any]:
    """A response that has begun, with what was asked."""
    given = body.model_dump(
        include={"instructions", "max_output_tokens", "metadata", "text", "tools"},
        by_alias=True,
        exclude_none=True,
    )
    begun = head("resp", "response", model)
    choice = body.tool_choice
    return {
        "id": begun["id"],
        "object": "response",
        "created_at": begun["created"],
        "model": model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "tools": [],
        "text": {"format": {"type": "text"}},
        **given,
        "tool_choice": choice.model_dump()
        if isinstance(choice, NamedFunction)
        else choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "truncation": "disabled",
        "output": [],
        "usage": None,
    }


def _end(items: OutputItems, usage: Usage, *, cut: bool) -> dict[str, Any]:
    return {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items.output,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def _scores(part: str) -> dict[str, Any]:
    """Events of text have log-probabilities; there are none here."""
    return {"logprobs": []} if part == "output_text" else {}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
