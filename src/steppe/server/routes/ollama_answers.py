"""What Ollama's routes have in common: names, errors, and answers as lines of JSON."""

from __future__ import annotations

import time
from dataclasses import astuple
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from steppe.errors import SteppeError
from steppe.request import FinishReason
from steppe.server.errors import ENVELOPES, Problem, dump
from steppe.server.generation import model_named, problem_for
from steppe.server.interpretation import AnswerPart
from steppe.server.logprobs import chat_logprobs
from steppe.text.tools.calls import CallPart, joined_calls

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from steppe.request import TokenLogprob, Usage
    from steppe.server.generation import Serving
    from steppe.server.routes.chat import StartedChat

__all__ = ["PREFIX", "OllamaAnswer", "loaded", "nanoseconds", "now", "ollama_model"]

PREFIX = "/api/"

Shape = dict[str, Any]


def ollama_envelope(problem: Problem) -> Shape:
    """The error object of Ollama's API, which is a message and nothing else."""
    return {"error": problem.message}


ENVELOPES[PREFIX] = ollama_envelope


def ollama_model(serving: Serving, name: str) -> str:
    """The name that was asked for, if it is served; the tag ``latest`` goes without saying.

    Raises ProblemError (404).
    """
    if name not in serving.names:
        model_named(serving, name.removesuffix(":latest"))
    return name


def now(at: float | None = None) -> str:
    """A time (in seconds since 1970), as this API writes it."""
    when = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    return when.isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """A duration, as this API counts it."""
    return round(seconds * 1e9)


def loaded(model: str, said: Shape) -> Shape:
    """The answer to a request without a prompt: the model is there."""
    return {"model": model, "created_at": now(), **said, "done": True, "done_reason": "load"}


class WholeCalls:
    """Keeps the parts of a call until it is whole: this API has no other."""

    def __init__(self) -> None:
        self._parts: list[CallPart] = []

    def push(self, parts: Iterable[AnswerPart]) -> list[AnswerPart]:
        """The same, without calls that are not whole."""
        ready = []
        for part in parts:
            for call in part.calls:
                if call.name:
                    ready += self.finish()
                self._parts.append(call)
                if call.complete:
                    ready += self.finish()
            if part.reasoning or part.content:
                ready.append(part._replace(calls=()))
        return ready

    def finish(self) -> list[AnswerPart]:
        """What there is of a call that nothing more comes of."""
        calls = joined_calls(self._parts)
        self._parts = []
        return [AnswerPart(calls=(CallPart(*astuple(call)),)) for call in calls]


class OllamaAnswer:
    """One answer: as lines while it comes, or whole, which is the same added up.

    ``said`` is what the route makes of a part. ``began`` is when the request came, on the
    performance counter. For one reader.
    """

    def __init__(
        self,
        started: StartedChat,
        model: str,
        said: Callable[[AnswerPart], Shape],
        began: float,
    ) -> None:
        self._started = started
        self._model = model
        self._said = said
        self._began = began
        self._end: Shape = {}

    async def lines(self) -> AsyncGenerator[bytes]:
        """One JSON object a line; an error, if one comes, is the last."""
        parts = self._parts()
        try:
            async for part, scores in parts:
                yield _line({**self._head(), **self._said(part), **scores, "done": False})
            yield _line({**self._head(), **self._said(AnswerPart()), **self._end})
        except SteppeError as error:
            yield _line(ollama_envelope(problem_for(self._started.run.serving, error)))
        finally:
            await parts.aclose()

    async def whole(self) -> Shape:
        """The whole answer. Raises what ended it early."""
        parts, scored = [], []
        async for part, scores in self._parts():
            parts.append(part)
            scored += scores.get("logprobs", ())
        whole = AnswerPart(
            "".join(part.reasoning for part in parts),
            "".join(part.content for part in parts),
            tuple(call for part in parts for call in part.calls),
        )
        scores = {} if self._started.params.logprobs is None else {"logprobs": scored}
        return {**self._head(), **self._said(whole), **scores, **self._end}

    async def _parts(self) -> AsyncGenerator[tuple[AnswerPart, Shape]]:
        """Each part, and the log-probabilities that go with it; leaves ``_end`` behind."""
        reader, whole = self._started.answers.reader(), WholeCalls()
        submitted = time.perf_counter()
        first = submitted
        chunks = self._started.run.chunks()
        try:
            async for _, chunk in chunks:
                reason = chunk.finish_reason
                if reason in (FinishReason.CANCELLED, FinishReason.ERROR):
                    continue  # what is raised after the last chunk says how it ended
                if first == submitted and chunk.token_ids:
                    first = time.perf_counter()
                parts = whole.push(reader.push(chunk.text))
                if reason is not None:
                    parts += whole.push(reader.finish(reason)) + whole.finish()
                scores = self._scores(chunk.logprobs)
                if scores and not parts:
                    parts = [AnswerPart()]
                for part in parts:
                    yield part, scores
                    scores = {}
                if reason is not None and chunk.usage is not None:
                    times = (submitted, first, time.perf_counter())
                    self._end = self._ended(reason, chunk.usage, times)
        finally:
            await chunks.aclose()

    def _scores(self, entries: tuple[TokenLogprob, ...] | None) -> Shape:
        top = self._started.params.logprobs
        if top is None or not entries:
            return {}
        return {"logprobs": chat_logprobs(self._started.run.serving.client, entries, top)}

    def _head(self) -> Shape:
        return {"model": self._model, "created_at": now()}

    def _ended(
        self, reason: FinishReason, usage: Usage, times: tuple[float, float, float]
    ) -> Shape:
        submitted, first, end = times
        return {
            "done": True,
            "done_reason": str(reason),
            "total_duration": nanoseconds(end - self._began),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - submitted),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(end - first),
        }


def _line(value: Shape) -> bytes:
    return dump(value) + b"\n"
