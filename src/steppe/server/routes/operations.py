"""``GET /health``, ``/ready`` and ``/metrics``: what operators and load balancers ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from steppe.server.generation import serving_of
from steppe.server.metrics import CONTENT_TYPE
from steppe.server.routes.answers import JSONAnswer

if TYPE_CHECKING:
    from steppe.engine.config import EngineHealth

__all__ = ["router"]

router = APIRouter()


@router.get("/health", response_class=JSONAnswer)
async def health(request: Request) -> Response:
    """Whether this process is worth keeping: 503 once its engine has failed for good."""
    state = await serving_of(request).client.health()
    return _report(state, alive=state.state not in ("failed", "stopped"))


@router.get("/ready", response_class=JSONAnswer)
async def ready(request: Request) -> Response:
    """Whether requests are accepted and tokens flow: 503 while a step hangs, or it shuts down."""
    state = await serving_of(request).client.health()
    return _report(state, alive=state.ok)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counters, gauges and latencies in the Prometheus text format."""
    serving = serving_of(request)
    client, known = serving.client, serving.metrics
    known.steps((await client.activity(known.last_step)).steps)
    page = known.page(
        await client.metrics(),
        await client.health(),
        client.card.cache_tokens,
        client.replicas(),
        await client.context_cache_metrics(),
    )
    return Response(page, media_type=CONTENT_TYPE)


def _report(state: EngineHealth, *, alive: bool) -> JSONAnswer:
    report: dict[str, Any] = {
        "status": "ok" if alive else "unavailable",
        "engine": state.state,
        "queued": state.queued,
        "resident": state.resident,
    }
    if state.busy_for is not None:
        report["busy_for"] = round(state.busy_for, 3)
    if state.cause is not None:
        report["cause"] = state.cause
    return JSONAnswer(report, status_code=200 if alive else 503)
