"""What a request looks like to an OpenAI-compatible server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from steppe.errors import UnsupportedRequestError
from steppe.request import SamplingParams

if TYPE_CHECKING:
    from steppe.params import Guided
    from steppe.request import LLMGenerationRequest

__all__ = ["embedding_body", "generation_body", "tokens_of"]

ALWAYS = ("n", "temperature", "top_p", "presence_penalty", "frequency_penalty")
"""Said even where it is the default: a server may have another one."""
BEYOND = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop",
)
"""Fields that the OpenAI API does not have, and the engines that copy it do."""
DEFAULTS = SamplingParams()


def generation_body(
    request: LLMGenerationRequest, model: str, *, extensions: bool
) -> tuple[str, dict[str, Any]]:
    """The path and the body that ask for this, as a stream.

    Without ``extensions`` only fields of the OpenAI API itself are used. Raises
    UnsupportedRequestError for what cannot be asked of such a server.
    """
    params = request.params
    if params.prompt_logprobs is not None:
        raise UnsupportedRequestError("prompt_logprobs", "a remote engine does not stream them")
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: getattr(params, name) for name in ALWAYS},
    }
    if params.max_tokens is not None:
        body["max_tokens"] = params.max_tokens
    if params.seed is not None:
        # Their seeds have a sign.
        body["seed"] = params.seed if params.seed < 2**63 else params.seed - 2**64
    if params.stop:
        body["stop"] = list(params.stop)
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if extensions:
        body |= _extensions(request)
    else:
        _check_plain(request)
    if request.messages is not None:
        if params.logprobs is not None:
            raise UnsupportedRequestError("logprobs", "a remote chat does not name its tokens")
        return "/chat/completions", {**body, "messages": [dict(one) for one in request.messages]}
    assert request.prompt is not None
    if params.logprobs is not None:
        body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    return "/completions", {**body, "prompt": prompt}


def _extensions(request: LLMGenerationRequest) -> dict[str, Any]:
    params = request.params
    # What is off is said too, or a server's own generation defaults would switch it on.
    fields: dict[str, Any] = {
        name: getattr(params, name) for name in ("top_k", "min_p", "repetition_penalty")
    }
    for name in BEYOND:
        value = getattr(params, name)
        if value != getattr(DEFAULTS, name):
            fields[name] = list(value) if name == "stop_token_ids" else value
    if request.messages is None:
        fields["return_token_ids"] = True
    if request.priority:
        fields["priority"] = request.priority
    if params.guided is not None:
        fields |= _form(params.guided)
    return fields


def _form(guided: Guided) -> dict[str, Any]:
    kind, text = guided.source
    value: Any = {"json_object": True, "choice": guided.choice}.get(kind, text)
    if kind == "json_schema":
        value = json.loads(text)
    if guided.after is not None:
        return {"guided": {kind: value, "after": guided.after}}
    return {"structured_outputs": {"json" if kind == "json_schema" else kind: value}}


def _check_plain(request: LLMGenerationRequest) -> None:
    params = request.params
    for name in (*BEYOND, "guided", "logprobs"):
        if getattr(params, name) != getattr(DEFAULTS, name):
            raise UnsupportedRequestError(
                name, "this remote engine knows the fields of the OpenAI API only"
            )


def embedding_body(request: LLMGenerationRequest, model: str) -> tuple[str, dict[str, Any]]:
    """The path and the body that ask for an embedding."""
    if request.prompt is None:
        raise UnsupportedRequestError("messages", "a remote engine embeds text or token ids")
    prompt = request.prompt if isinstance(request.prompt, str) else [list(request.prompt)]
    return "/embeddings", {"model": model, "input": prompt, "encoding_format": "float"}


def tokens_of(request: LLMGenerationRequest, context_length: int) -> int:
    """How many tokens it may take, prompt and answers, as far as can be told beforehand."""
    prompt = request.prompt or ""
    length = len(prompt) // 4 if isinstance(prompt, str) else len(prompt)
    if request.task == "embed":
        return length
    most = request.params.max_tokens
    room = max(0, context_length - length)
    return length + request.params.n * (room if most is None else min(most, room))
