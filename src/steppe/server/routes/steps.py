"""``GET /v1/engine/steps`` and ``DELETE /v1/engine/requests/{id}``: what the page shows and does.

What is told is who sits where and how far along: no prompt, no text, nothing of who asked.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from steppe.server.errors import Problem, ProblemError
from steppe.server.generation import serving_of
from steppe.server.routes.answers import JSONAnswer

if TYPE_CHECKING:
    from steppe.engine.activity import LiveSequence, StepSummary
    from steppe.stepping.cache_metrics import ContextCacheMetrics

__all__ = ["router"]

router = APIRouter()

COUNTERS = (
    "submitted", "refused", "completed", "cancelled", "failed", "steps", "tokens", "preemptions",
)  # fmt: skip


@router.get("/v1/engine/steps", response_class=JSONAnswer)
async def recent_steps(
    request: Request,
    after: Annotated[int, Query(ge=0, description="Number of the last step you know.")] = 0,
    limit: Annotated[int, Query(ge=0, le=1024, description="Most steps, the newest.")] = 256,
) -> Response:
    """What the engine is doing: its seats, its queue, and its last steps.

    Steps are written down only while somebody goes on asking, so the first answer has none.
    """
    client = serving_of(request).client
    activity = await client.activity(after)
    health, metrics = await client.health(), await client.metrics()
    steps = activity.steps[max(0, len(activity.steps) - limit) :]
    return JSONAnswer(
        {
            "object": "engine.activity",
            "now": activity.now,
            "ok": health.ok,
            "state": health.state,
            "cause": health.cause,
            "queued": health.queued,
            "resident": health.resident,
            "seats": client.card.max_batch_size,
            "max_pending": client.card.max_pending,
            "cache_tokens": client.card.cache_tokens,
            "cache": _cache(await client.context_cache_metrics()),
            "counters": {name: getattr(metrics, name) for name in COUNTERS},
            "live": [_live(one, activity.now) for one in activity.live],
            "steps": [_step(one) for one in steps],
            "replicas": [{**asdict(one), "cache": _cache(one.cache)} for one in client.replicas()],
        }
    )


@router.delete("/v1/engine/requests/{request_id}", response_class=JSONAnswer)
async def cancel_request(
    request: Request,
    request_id: Annotated[int, Path(ge=1, description="A `request_id` of `/v1/engine/steps`.")],
) -> Response:
    """Cancel a request, whoever sent it. Its client is told so."""
    client = serving_of(request).client
    live = (await client.activity()).live
    if not any(one.request_id == request_id for one in live):
        raise ProblemError(
            Problem(404, "no such request is running or waiting", code="request_not_found")
        )
    client.cancel(request_id)
    return JSONAnswer({"id": request_id, "object": "engine.request", "cancelled": True})


def _live(one: LiveSequence, now: float) -> dict[str, Any]:
    return {
        "id": one.id,
        "request_id": one.request_id,
        "seat": one.seat,
        "age": max(0.0, now - one.submitted_at),
        "prompt_tokens": one.prompt_tokens,
        "tokens": one.tokens,
        "max_tokens": one.max_tokens,
        "stopping": one.stopping,
    }


def _step(one: StepSummary) -> dict[str, Any]:
    return {
        "number": one.number,
        "began": one.began,
        "seconds": one.seconds,
        "prefills": one.prefills,
        "decodes": one.decodes,
        "preempted": one.preempted,
        "first_tokens": one.first_tokens,
        "tokens": one.tokens,
        "queued": one.queued,
        "resident": one.resident,
        "free_pages": one.free_pages,
        "page_size": one.page_size,
    }


def _cache(cache: ContextCacheMetrics | None) -> dict[str, object] | None:
    """How much computed prefixes spare; null where that is not known."""
    if cache is None:
        return None
    names = ("reused_tokens", "cached_pages", "leased_pages", "total_pages", "evicted_pages")
    return {"hit_rate": cache.hit_rate, **{name: getattr(cache, name) for name in names}}
