"""``POST /api/chat`` and ``POST /api/generate``: Ollama's API."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from steppe.server.errors import naming
from steppe.server.generation import serving_of, start
from steppe.server.interpretation import AnswerPart, Interpretation, arguments_of, call_id
from steppe.server.protocol.ollama import OllamaChatRequest, OllamaGenerateRequest
from steppe.server.routes.answers import JSONAnswer
from steppe.server.routes.chat import StartedChat, start_chat
from steppe.server.routes.ollama_answers import OllamaAnswer, loaded, ollama_model
from steppe.server.sse import EventStream

if TYPE_CHECKING:
    from steppe.server.generation import Serving

__all__ = ["router"]

router = APIRouter()

NDJSON = "application/x-ndjson"


@router.post("/api/chat", response_class=JSONAnswer)
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """Answer a conversation, as a stream unless it says otherwise."""
    serving, began = serving_of(request), time.perf_counter()
    model = ollama_model(serving, body.model)
    if not body.messages:
        body.refuse_unloading()
        return JSONAnswer(loaded(model, _message(AnswerPart())))
    completion, settings = body.chat(serving.client.card), body.settings
    started = await start_chat(serving, request, completion, settings.names, settings.within)
    answer = OllamaAnswer(started, model, _message, began)
    return await _respond(serving, answer, stream=body.stream)


@router.post("/api/generate", response_class=JSONAnswer)
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    """Answer one prompt, as a stream unless it says otherwise."""
    serving, began = serving_of(request), time.perf_counter()
    client, card = serving.client, serving.client.card
    model = ollama_model(serving, body.model)
    completion, settings = body.chat(card), body.settings
    if not body.prompt:
        body.refuse_unloading()
        return JSONAnswer(loaded(model, _response(AnswerPart())))
    if body.raw or not (card.has_chat_template or body.system):
        names = {**settings.names, "guided": "format", "logprobs": "top_logprobs"}
        with naming(**names):
            params = completion.params(card.generation_defaults)
            client.check_room(1)
            # A raw prompt is the whole of it, with the marks that its model knows.
            ids = await client.tokenize(body.prompt, parse_special=bool(body.raw))
            params = settings.within(params, len(ids))
            run = await start(serving, request, [ids], params, priority=completion.priority)
        started = StartedChat(run, Interpretation(), ids, params)
    else:
        names = {"messages": "prompt", **settings.names, "prompt": "prompt"}
        started = await start_chat(serving, request, completion, names, settings.within)
    answer = OllamaAnswer(started, model, _response, began)
    return await _respond(serving, answer, stream=body.stream)


async def _respond(serving: Serving, answer: OllamaAnswer, *, stream: bool) -> Response:
    if stream:
        # A line that says nothing is no JSON, so a silent stream stays silent.
        return EventStream(answer.lines(), serving.settings, media_type=NDJSON, ping=b"")
    return JSONAnswer(await answer.whole())


def _message(part: AnswerPart) -> dict[str, Any]:
    """What ``/api/chat`` says of a part."""
    message: dict[str, Any] = {"role": "assistant", "content": part.content}
    if part.reasoning:
        message["thinking"] = part.reasoning
    if part.calls:
        message["tool_calls"] = [
            {
                "id": call_id(),
                "function": {"name": call.name, "arguments": arguments_of(call)},
            }
            for call in part.calls
        ]
    return {"message": message}


def _response(part: AnswerPart) -> dict[str, Any]:
    """What ``/api/generate`` says of a part."""
    thought = {"thinking": part.reasoning} if part.reasoning else {}
    return {"response": part.content, **thought}
