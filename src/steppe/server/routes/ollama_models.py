"""The rest of Ollama's API: which model there is, its embeddings, and what is not done here."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from steppe import __version__
from steppe.errors import InvalidRequestError
from steppe.server.errors import Problem, ProblemError
from steppe.server.generation import Serving, serving_of
from steppe.server.protocol.embeddings import EmbeddingRequest
from steppe.server.protocol.ollama import NamedModel, OllamaEmbedRequest
from steppe.server.routes.answers import JSONAnswer
from steppe.server.routes.embeddings import embed
from steppe.server.routes.ollama_answers import PREFIX, nanoseconds, now, ollama_model

__all__ = ["router"]

router = APIRouter()

NOT_HERE = ("blobs/{digest}", "copy", "create", "delete", "pull", "push")
"""What manages a store of models: this server has one model and keeps it."""


@router.get("/api/version", response_class=JSONAnswer)
async def version() -> Response:
    """The version of this server, which is not Ollama's."""
    return JSONAnswer({"version": __version__})


@router.get("/api/tags", response_class=JSONAnswer)
async def tags(request: Request) -> Response:
    """Every name this server answers to."""
    serving = serving_of(request)
    return JSONAnswer({"models": [_entry(serving, name) for name in serving.names]})


@router.get("/api/ps", response_class=JSONAnswer)
async def running(request: Request) -> Response:
    """The same: what is served is loaded."""
    serving = serving_of(request)
    context = {"context_length": serving.client.card.context_length}
    return JSONAnswer({"models": [{**_entry(serving, one), **context} for one in serving.names]})


@router.post("/api/show", response_class=JSONAnswer)
async def show(body: NamedModel, request: Request) -> Response:
    """What is known of a model."""
    serving = serving_of(request)
    card = serving.client.card
    ollama_model(serving, body.named())
    defaults = [f"{name} {value}" for name, value in card.generation_defaults.items()]
    abilities = ["completion", "embedding"]
    abilities += ["tools"] if card.tools is not None else []
    abilities += ["thinking"] if card.reasoning is not None else []
    return JSONAnswer(
        {
            "modified_at": now(serving.started),
            "parameters": "\n".join(defaults),
            "details": {},
            "model_info": {
                "general.name": card.name,
                "context_length": card.context_length,
                "vocab_size": card.vocab_size,
            },
            "capabilities": abilities,
        }
    )


@router.post("/api/embed", response_class=JSONAnswer)
async def embed_texts(body: OllamaEmbedRequest, request: Request) -> Response:
    """The embeddings of texts."""
    began, serving = time.perf_counter(), serving_of(request)
    model = ollama_model(serving, body.model)
    if body.input is None:
        raise InvalidRequestError("input", "is required")
    asked = EmbeddingRequest.model_validate(body.model_dump(include={"input", "dimensions"}))
    vectors, usage = await embed(serving, request, asked)
    return JSONAnswer(
        {
            "model": model,
            "embeddings": vectors,
            "total_duration": nanoseconds(time.perf_counter() - began),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
        }
    )


@router.post("/api/embeddings", response_class=JSONAnswer)
async def embed_one(body: OllamaEmbedRequest, request: Request) -> Response:
    """The embedding of one text, as older clients ask."""
    serving = serving_of(request)
    ollama_model(serving, body.model)
    if body.prompt is None:
        raise InvalidRequestError("prompt", "is required")
    asked = EmbeddingRequest.model_validate({"input": body.prompt})
    vectors, _ = await embed(serving, request, asked)
    return JSONAnswer({"embedding": vectors[0]})


async def _not_here(request: Request) -> Response:
    what = request.url.path.removeprefix(PREFIX).partition("/")[0]
    raise ProblemError(
        Problem(
            400,
            f"{what}: this server has the one model it was started with",
            code="unsupported_operation",
        )
    )


for _path in NOT_HERE:
    router.add_api_route(
        PREFIX + _path, _not_here, methods=["POST", "DELETE", "HEAD"], include_in_schema=False
    )


def _entry(serving: Serving, name: str) -> dict[str, Any]:
    """A model in a list. The digest stands for the name: there is no store with digests."""
    return {
        "name": name,
        "model": name,
        "modified_at": now(serving.started),
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": {},
    }
