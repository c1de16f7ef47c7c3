"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import Response

from steppe.errors import ContextLengthError
from steppe.request import SamplingParams
from steppe.server.errors import naming
from steppe.server.generation import model_named, serving_of, start, total_usage
from steppe.server.protocol.embeddings import EmbeddingRequest
from steppe.server.routes.answers import JSONAnswer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from steppe.request import LLMGenerationResponse, Usage
    from steppe.server.generation import Serving

__all__ = ["embed", "router"]

router = APIRouter()


@router.post("/v1/embeddings", response_class=JSONAnswer)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """The embeddings of texts, each a vector of unit length."""
    serving = serving_of(request)
    model = model_named(serving, body.model)
    vectors, usage = await embed(serving, request, body)
    return JSONAnswer(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _encoded(vector, body)}
                for index, vector in enumerate(vectors)
            ],
            "model": model,
            "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
        }
    )


async def embed(
    serving: Serving, request: Request, body: EmbeddingRequest
) -> tuple[list[Sequence[float]], Usage]:
    """The vectors, in order, and what they took. Raises InvalidRequestError (``input``) and its
    kin, SubmitError.
    """
    client, card = serving.client, serving.client.card
    responses: list[LLMGenerationResponse] = []
    with naming(prompt="input", n="input"):
        inputs = body.inputs()
        # A long list takes turns with other requests, a few steps' worth of it at a time.
        wave = min(2 * card.max_batch_size, card.max_pending)
        client.check_room(min(len(inputs), wave))
        ids = [await client.tokenize(one) if isinstance(one, str) else one for one in inputs]
        for one in ids:
            _check_context(one, card.context_length)
        for part in _waves(ids, wave, card.max_pending_tokens):
            run = await start(serving, request, part, SamplingParams(), task="embed")
            answers = await run.responses()
            if not responses:
                body.check_size(len(answers[0].outputs[0].embedding or ()))
            responses += answers
    vectors: list[Sequence[float]] = [one.outputs[0].embedding or () for one in responses]
    return vectors, total_usage([one.usage for one in responses])


def _waves(
    ids: Sequence[Sequence[int]], count: int, tokens: int | None
) -> Iterator[list[Sequence[int]]]:
    """``ids`` in order, so many at once, or fewer where they have more than half of ``tokens``."""
    wave: list[Sequence[int]] = []
    size = 0
    for one in ids:
        if len(wave) == count or (wave and tokens is not None and size + len(one) > tokens // 2):
            yield wave
            wave, size = [], 0
        wave.append(one)
        size += len(one)
    if wave:
        yield wave


def _check_context(ids: Sequence[int], limit: int) -> None:
    """Raise ContextLengthError before any of a long list is computed."""
    if len(ids) > limit:
        raise ContextLengthError(
            "prompt",
            f"has {len(ids)} tokens, the context has room for {limit}",
            needed=len(ids),
            available=limit,
        )


def _encoded(vector: Sequence[float], body: EmbeddingRequest) -> Sequence[float] | str:
    """Numbers, or the base64 of little-endian float32."""
    if body.encoding_format != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
