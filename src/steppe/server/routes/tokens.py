"""``POST /tokenize`` and ``POST /detokenize``: the model's tokenizer, as requests meet it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from steppe.server.errors import naming
from steppe.server.generation import model_named, serving_of
from steppe.server.protocol.chat import template_messages, template_variables
from steppe.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from steppe.server.routes.answers import JSONAnswer

__all__ = ["router"]

router = APIRouter()


@router.post("/tokenize", response_class=JSONAnswer)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The ids of a text, or of a conversation as the chat template renders it."""
    serving = serving_of(request)
    client = serving.client
    model_named(serving, body.model)
    body.check()
    if body.messages is not None:
        ids = await client.encode_chat(
            template_messages(body.messages),
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None,
            add_generation_prompt=body.add_generation_prompt,
            variables=template_variables(body.chat_template_kwargs),
        )
    else:
        ids = await client.tokenize(
            body.prompt or "",
            add_special_tokens=body.add_special_tokens,
            parse_special=body.parse_special,
        )
    answer = {"count": len(ids), "max_model_len": client.card.context_length, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [client.token_bytes(i).decode("utf-8", "replace") for i in ids]
    return JSONAnswer(answer)


@router.post("/detokenize", response_class=JSONAnswer)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of ids."""
    serving = serving_of(request)
    model_named(serving, body.model)
    with naming(token_ids="tokens"):
        text = await serving.client.detokenize(
            body.tokens, skip_special_tokens=body.skip_special_tokens
        )
    return JSONAnswer({"prompt": text})
