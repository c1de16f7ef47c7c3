"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from steppe.server.errors import naming
from steppe.server.generation import model_named, serving_of, start
from steppe.server.interpretation import call_object
from steppe.server.logprobs import chat_logprobs
from steppe.server.protocol.chat import ChatCompletionRequest, template_messages
from steppe.server.routes.answers import JSONAnswer, head, openai_events, usage_object
from steppe.server.routes.streams import streamed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from steppe.client import EngineClient
    from steppe.request import LLMGenerationResponse, SamplingParams
    from steppe.server.generation import Run, Serving
    from steppe.server.interpretation import AnswerPart, AnswerReader, Interpretation
    from steppe.streaming import StreamChunk

__all__ = ["StartedChat", "router", "start_chat"]

router = APIRouter()


class StartedChat(NamedTuple):
    """A conversation that is being answered, and how its answers are read."""

    run: Run
    answers: Interpretation
    prompt: Sequence[int]
    params: SamplingParams


async def start_chat(
    serving: Serving,
    request: Request,
    body: ChatCompletionRequest,
    names: Mapping[str, str] | None = None,
    within: Callable[[SamplingParams, int], SamplingParams] | None = None,
    *,
    resumable: bool = False,
) -> StartedChat:
    """Hand a conversation to the engine. Raises as ``start`` does, and for a bad body, naming its
    fields, or what ``names`` says that the API calls them. ``within`` may change the parameters
    once the length of the prompt is known. ``resumable`` as for ``start``.
    """
    client = serving.client
    renamed = {"prompt": "messages", "logprobs": "top_logprobs", **(names or {})}
    form = body.form_field() or "guided"
    renamed["guided"] = renamed.get(form, form)
    if body.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    with naming(**renamed):
        params = body.params(client.card.generation_defaults)
        client.check_room(params.n)
        prompt = await client.encode_chat(
            template_messages(body.messages),
            tools=body.template_tools(),
            variables=body.template_variables(),
        )
        answers = await body.interpretation(client.card).after(client, prompt)
        params = answers.adapted(params)
        if within is not None:
            params = within(params, len(prompt))
        run = await start(
            serving,
            request,
            [prompt],
            params,
            cache_salt=body.cache_salt,
            priority=body.priority,
            resumable=resumable,
        )
    return StartedChat(run, answers, prompt, params)


@router.post("/v1/chat/completions", response_class=JSONAnswer)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    serving = serving_of(request)
    client = serving.client
    model = model_named(serving, body.model)
    started = await start_chat(serving, request, body, resumable=bool(body.stream))
    run, answers = started.run, started.answers
    top = started.params.logprobs
    if body.stream:
        events = openai_events(
            run,
            head("chatcmpl", "chat.completion.chunk", model),
            ChatDeltas(client, answers, top),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
        )
        return streamed(request, run, events)
    (response,) = await run.responses()
    return JSONAnswer(
        {
            **head("chatcmpl", "chat.completion", model),
            "choices": _choices(client, answers, response, top),
            "usage": usage_object(response.usage),
        }
    )


class ChatDeltas:
    """Turns chunks into choice objects of a stream: a role first, then deltas, then one end."""

    def __init__(self, client: EngineClient, answers: Interpretation, top: int | None) -> None:
        self._client = client
        self._answers = answers
        self._top = top
        self._readers: dict[int, AnswerReader] = {}
        self._calls: Counter[int] = Counter()

    def __call__(self, index: int, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """The choice objects of one chunk. Its log-probabilities go with the first of its text, or
        with none if that is held back.
        """
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._answers.reader()
            yield self._choice(index, {"role": "assistant", "content": ""})
        parts = reader.push(chunk.text)
        if chunk.finish_reason is not None:
            parts += reader.finish(chunk.finish_reason)
        deltas = [delta for part in parts for delta in self._deltas(index, part)]
        if self._top is not None and chunk.logprobs:
            logprobs = {
                "content": chat_logprobs(self._client, chunk.logprobs, self._top),
                "refusal": None,
            }
            first = deltas.pop(0) if deltas else {"content": ""}
            yield self._choice(index, first, logprobs=logprobs)
        for delta in deltas:
            yield self._choice(index, delta)
        if chunk.finish_reason is not None:
            reason = reader.finish_reason(chunk.finish_reason)
            yield self._choice(index, {}, finish_reason=reason)

    def _deltas(self, index: int, part: AnswerPart) -> Iterator[dict[str, Any]]:
        if part.reasoning:
            yield {"reasoning_content": part.reasoning}
        if part.content:
            yield {"content": part.content}
        for call in part.calls:
            if call.name:
                self._calls[index] += 1
                told = call_object(call)
            else:
                told = {"function": {"arguments": call.arguments}}
            yield {"tool_calls": [{"index": self._calls[index] - 1, **told}]}

    @staticmethod
    def _choice(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}


def _choices(
    client: EngineClient, answers: Interpretation, response: LLMGenerationResponse, top: int | None
) -> list[dict[str, Any]]:
    choices = []
    for output in response.outputs:
        read = answers.message(output.text, output.finish_reason)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if read.calls and not read.content else read.content,
            "refusal": None,
        }
        if answers.reasoning is not None:
            message["reasoning_content"] = read.reasoning or None
        if read.calls:
            message["tool_calls"] = [call_object(call) for call in read.calls]
        logprobs = None
        if top is not None:
            logprobs = {
                "content": chat_logprobs(client, output.logprobs or (), top),
                "refusal": None,
            }
        choices.append(
            {
                "index": output.index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": read.finish_reason,
            }
        )
    return choices
