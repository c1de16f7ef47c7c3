"""``GET /v1/models`` and ``GET /v1/models/{name}``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from steppe.server.generation import Serving, model_named, serving_of
from steppe.server.routes.answers import JSONAnswer

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/models", response_class=JSONAnswer)
async def list_models(request: Request) -> Response:
    """Every name this server answers to."""
    serving = serving_of(request)
    return JSONAnswer({"object": "list", "data": [_model(serving, n) for n in serving.names]})


@router.get("/v1/models/{name:path}", response_class=JSONAnswer)
async def get_model(name: str, request: Request) -> Response:
    """One of them."""
    serving = serving_of(request)
    return JSONAnswer(_model(serving, model_named(serving, name)))


def _model(serving: Serving, name: str) -> dict[str, Any]:
    card = serving.client.card
    return {
        "id": name,
        "object": "model",
        "created": serving.started,
        "owned_by": "steppe",
        "root": card.name,
        "max_model_len": card.context_length,
        "vocab_size": card.vocab_size,
        "chat": card.has_chat_template,
        "generation_defaults": dict(card.generation_defaults),
    }
