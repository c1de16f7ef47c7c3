"""``POST /v1/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from steppe.server.errors import naming
from steppe.server.generation import model_named, serving_of, start, total_usage
from steppe.server.logprobs import CompletionLogprobs
from steppe.server.protocol.completions import CompletionRequest
from steppe.server.routes.answers import JSONAnswer, head, openai_events, usage_object
from steppe.server.routes.streams import streamed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from steppe.client import EngineClient
    from steppe.request import SequenceOutput
    from steppe.streaming import StreamChunk

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/completions", response_class=JSONAnswer)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts, whole or as a stream of events."""
    serving = serving_of(request)
    client = serving.client
    model = model_named(serving, body.model)
    form = body.form_field() or "guided"
    with naming(guided=form):
        params = body.params(client.card.generation_defaults)
    prompts = body.prompts()
    with naming(n="prompt" if len(prompts) > 1 else "n"):
        client.check_room(len(prompts) * params.n)
    ids = [
        await client.tokenize(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
    ]
    with naming(guided=form):
        run = await start(
            serving,
            request,
            ids,
            params,
            cache_salt=body.cache_salt,
            priority=body.priority,
            resumable=bool(body.stream),
        )
    echoed = None
    if body.echo:
        echoed = [
            prompt if isinstance(prompt, str) else await client.detokenize(prompt)
            for prompt in prompts
        ]
    if body.stream:
        events = openai_events(
            run,
            head("cmpl", "text_completion", model),
            CompletionDeltas(client, body, echoed, params.n),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
        )
        return streamed(request, run, events)
    responses = await run.responses()
    choices = []
    for i, response in enumerate(responses):
        for output in response.outputs:
            logprobs = None
            if body.logprobs is not None:
                logprobs = _logprobs(client, body, output, ids[i] if echoed else ())
            choice = {
                "index": i * params.n + output.index,
                "text": (echoed[i] if echoed else "") + output.text,
                "logprobs": logprobs,
                "finish_reason": output.finish_reason,
            }
            if body.return_token_ids:
                choice |= {"token_ids": output.token_ids, "prompt_token_ids": ids[i]}
            choices.append(choice)
    return JSONAnswer(
        {
            **head("cmpl", "text_completion", model),
            "choices": choices,
            "usage": usage_object(total_usage([response.usage for response in responses])),
        }
    )


class CompletionDeltas:
    """Turns chunks into choice objects of a stream."""

    def __init__(
        self,
        client: EngineClient,
        body: CompletionRequest,
        echoed: Sequence[str] | None,
        n: int,
    ) -> None:
        self._client = client
        self._top = body.logprobs
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._ids = bool(body.return_token_ids)
        self._echoed = echoed
        self._n = n
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()

    def __call__(self, index: int, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """The choice objects of one chunk."""
        text = chunk.text
        if index not in self._begun:
            self._begun.add(index)
            if self._echoed is not None:
                text = self._echoed[index // self._n] + text
        logprobs = None
        if self._top is not None and chunk.logprobs:
            state = self._logprobs.setdefault(
                index, CompletionLogprobs(self._client, self._top, as_ids=self._as_ids)
            )
            logprobs = state.part(chunk.token_ids, chunk.logprobs)
        ids = {"token_ids": chunk.token_ids} if self._ids and chunk.token_ids else {}
        if text or logprobs or ids:
            yield self._choice(index, text, logprobs=logprobs, **ids)
        if chunk.finished:
            yield self._choice(index, "", finish_reason=chunk.finish_reason)

    @staticmethod
    def _choice(index: int, text: str, **more: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}


def _logprobs(
    client: EngineClient, body: CompletionRequest, output: SequenceOutput, prompt: Sequence[int]
) -> dict[str, Any]:
    """Of the echoed prompt, if there is one, and of what was generated."""
    assert body.logprobs is not None
    state = CompletionLogprobs(client, body.logprobs, as_ids=bool(body.return_tokens_as_token_ids))
    scored = [*output.prompt_logprobs] if prompt and output.prompt_logprobs else []
    return state.part(
        [*prompt[: len(scored)], *output.token_ids], [*scored, *(output.logprobs or ())]
    )
