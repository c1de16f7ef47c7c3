"""Requests, chunks and errors as JSON values, and back: checked, and nothing is executed.

Whatever is not as it should be raises ValueError, TypeError or LookupError (InvalidRequestError is
a ValueError): of a peer that sends it nothing more is believed.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from steppe import errors
from steppe.client import ModelCard
from steppe.engine.activity import EngineActivity, LiveSequence, StepSummary
from steppe.engine.config import EngineHealth
from steppe.engine.metrics import EngineMetrics
from steppe.errors import ReplicaError, SteppeError
from steppe.params import Guided, SamplingParams
from steppe.replicas.vocabulary import RunnerStatus, TokenChunk
from steppe.request import FinishReason, LLMGenerationRequest, TokenLogprob, Usage
from steppe.stepping.cache_metrics import ContextCacheMetrics

__all__ = [
    "read_activity",
    "read_card",
    "read_chunk",
    "read_error",
    "read_request",
    "read_status",
    "write_activity",
    "write_card",
    "write_chunk",
    "write_error",
    "write_request",
    "write_status",
]

Json = Any

# ---- requests ------------------------------------------------------------------------------------

OWN_WAY = ("prompt", "messages", "params", "stream_channel", "requests")
REQUEST_FIELDS = {
    field.name: field.default for field in fields(LLMGenerationRequest) if field.name not in OWN_WAY
}
DEFAULTS = SamplingParams()


def write_request(request: LLMGenerationRequest) -> dict[str, Json]:
    """A single request; its channel stays here."""
    request.check_single()
    params = {
        field.name: value
        for field in fields(SamplingParams)
        if (value := getattr(request.params, field.name)) != getattr(DEFAULTS, field.name)
    }
    guided = params.get("guided")
    if guided is not None:
        params["guided"] = {k: v for k, v in asdict(guided).items() if v not in (None, False)}
    if "logit_bias" in params:
        params["logit_bias"] = list(params["logit_bias"].items())
    told = {
        name: value
        for name, default in REQUEST_FIELDS.items()
        if (value := getattr(request, name)) != default
    }
    if request.prompt is not None:
        told["prompt"] = request.prompt
    else:
        told["messages"] = request.messages
    return {"params": params, **told}


def read_request(value: Json) -> LLMGenerationRequest:
    """The request that was written, checked as any other."""
    given = dict(value)
    params = dict(given.pop("params"))
    if (guided := params.pop("guided", None)) is not None:
        params["guided"] = Guided(**guided)
    if (bias := params.pop("logit_bias", None)) is not None:
        params["logit_bias"] = {int(token): float(weight) for token, weight in bias}
    return LLMGenerationRequest(params=SamplingParams(**params), **given)


# ---- chunks --------------------------------------------------------------------------------------


def write_chunk(chunk: TokenChunk) -> list[Json]:
    """Most chunks are a text and its ids; only the others pay for the rest."""
    short = [chunk.index, chunk.text, chunk.token_ids]
    if chunk.logprobs is None and not chunk.finished and chunk.usage is None:
        return short
    usage = chunk.usage
    return [
        *short,
        _write_logprobs(chunk.logprobs),
        chunk.finish_reason,
        chunk.stop_reason,
        None
        if usage is None
        else (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        _write_logprobs(chunk.prompt_logprobs),
        chunk.embedding,
    ]


def read_chunk(value: list[Json]) -> TokenChunk:
    """The chunk that was written."""
    index, text, ids, *rest = value
    if type(index) is not int or type(text) is not str or not all(type(i) is int for i in ids):
        raise TypeError("a chunk has an index, a text and token ids")
    if not rest:
        return TokenChunk(index, text, tuple(ids))
    logprobs, reason, stop, usage, prompt_logprobs, embedding = rest
    if stop is not None and not isinstance(stop, str | int):
        raise TypeError("a stop reason is a text or a token id")
    return TokenChunk(
        index,
        text,
        tuple(ids),
        _read_known(logprobs),
        reason is not None,
        None if reason is None else FinishReason(reason),
        stop,
        None if usage is None else Usage(*map(int, usage)),
        _read_logprobs(prompt_logprobs),
        None if embedding is None else tuple(map(float, embedding)),
    )


def _write_logprobs(entries: Json) -> Json:
    if entries is None:
        return None
    return [None if one is None else (one.token_id, one.logprob, one.top) for one in entries]


def _read_logprobs(entries: Json) -> tuple[TokenLogprob | None, ...] | None:
    return None if entries is None else tuple([_read_logprob(one) for one in entries])


def _read_known(entries: Json) -> tuple[TokenLogprob, ...] | None:
    found = _read_logprobs(entries)
    if found is None:
        return None
    known = tuple([one for one in found if one is not None])
    if len(known) != len(found):
        raise TypeError("every generated token has a logprob, or none has")
    return known


def _read_logprob(entry: Json) -> TokenLogprob | None:
    if entry is None:
        return None
    token, logprob, top = entry
    return TokenLogprob(int(token), float(logprob), tuple([(int(t), float(p)) for t, p in top]))


# ---- errors --------------------------------------------------------------------------------------

KINDS: dict[str, type[SteppeError]] = {
    name: kind
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, SteppeError)
}
DETAILS: dict[str, tuple[type, ...]] = {
    "field": (str,),
    "needed": (int,),
    "available": (int,),
    "reason": (str,),
    "which": (str,),
    "status": (int,),
    "retry_after": (float, int, type(None)),
}


def write_error(error: Exception) -> dict[str, Json]:
    """An error of our tree with its details; any other is told as a ReplicaError."""
    kind = type(error).__name__
    if KINDS.get(kind) is not type(error):
        return {"kind": "ReplicaError", "message": f"{kind}: {error}"}
    details = {name: getattr(error, name) for name in DETAILS if hasattr(error, name)}
    return {"kind": kind, "message": str(error), **details}


def read_error(value: Json) -> SteppeError:
    """The error that was written."""
    given = dict(value)
    kind, message = KINDS.get(given.pop("kind"), ReplicaError), str(given.pop("message"))
    # Not through its constructor: the message is the whole of it already.
    error = kind.__new__(kind, message)
    error.args = (message,)
    for name, detail in given.items():
        if not isinstance(detail, DETAILS[name]):
            raise TypeError(f"{name} of an error cannot be {detail!r}")
        setattr(error, name, detail)
    return error


# ---- state ---------------------------------------------------------------------------------------

CARD_FIELDS = tuple(
    field.name for field in fields(ModelCard) if field.name not in ("reasoning", "tools")
)


def write_card(card: ModelCard) -> dict[str, Json]:
    """A card, without the formats: those are read from the template, wherever it is."""
    told = {name: getattr(card, name) for name in CARD_FIELDS}
    return {**told, "generation_defaults": dict(card.generation_defaults)}


def read_card(value: Json) -> ModelCard:
    """The card that was written."""
    return ModelCard(**{name: value[name] for name in CARD_FIELDS})


def write_status(status: RunnerStatus) -> list[Json]:
    """An answer to a probe."""
    cache = None if status.cache is None else asdict(status.cache)
    return [asdict(status.health), asdict(status.metrics), cache]


def read_status(value: Json) -> RunnerStatus:
    """The answer that was written."""
    health, metrics, cache = value
    return RunnerStatus(
        EngineHealth(**health),
        EngineMetrics(**metrics),
        None if cache is None else ContextCacheMetrics(**cache),
    )


def write_activity(activity: EngineActivity) -> list[Json]:
    """What an engine is doing."""
    steps = [[getattr(one, field.name) for field in fields(one)] for one in activity.steps]
    live = [[getattr(one, field.name) for field in fields(one)] for one in activity.live]
    return [activity.now, steps, live]


def read_activity(value: Json) -> EngineActivity:
    """What was written of it."""
    now, steps, live = value
    return EngineActivity(
        float(now),
        tuple([StepSummary(*map(_frozen, step)) for step in steps]),
        tuple([LiveSequence(*one) for one in live]),
    )


def _frozen(value: Json) -> Json:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
