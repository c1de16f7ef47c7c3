"""The application: routes, errors and layers, put together."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from steppe import __version__
from steppe.errors import SteppeError
from steppe.server.disconnect import ConnectionMiddleware
from steppe.server.errors import Problem, envelope, validation_problem
from steppe.server.generation import Serving, problem_for, serving_of
from steppe.server.hosts import Hosts
from steppe.server.limits import AccessMiddleware, KeyRing
from steppe.server.resume import ASKED, TOKEN
from steppe.server.routes import (
    chat,
    completions,
    embeddings,
    messages,
    models,
    ollama,
    ollama_models,
    operations,
    page,
    responses,
    steps,
    streams,
    tokens,
)
from steppe.server.routes.answers import JSONAnswer
from steppe.server.settings import ServerSettings

if TYPE_CHECKING:
    from starlette.responses import Response

    from steppe.client import EngineClient

__all__ = ["create_app"]

logger = logging.getLogger("steppe.server")

APIS = (
    chat, completions, responses, messages, embeddings, models, tokens, ollama, ollama_models,
    streams,
)  # fmt: skip
ROUTERS = tuple(one.router for one in (*APIS, operations, steps, page))


def create_app(client: EngineClient, settings: ServerSettings | None = None) -> FastAPI:
    """The ASGI application over ``client``. It starts nothing and ends nothing: whoever made the
    client drains it.
    """
    settings = settings or ServerSettings()
    app = FastAPI(
        title="Steppe",
        version=__version__,
        # The pages of these are loaded from elsewhere; this server works without a network.
        docs_url=None,
        redoc_url=None,
    )
    app.state.serving = Serving(client, settings)
    for router in ROUTERS:
        app.include_router(router)

    async def known(request: Request, error: Exception) -> Response:
        problem = problem_for(serving_of(request), error)
        if problem.status >= 500 and problem.code in ("internal_error", "generation_failed"):
            logger.error("%s %s: %s", request.method, request.url.path, error, exc_info=error)
        return _answer(request, problem)

    async def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _answer(request, validation_problem(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _answer(request, _http_problem(request, error))

    app.add_exception_handler(SteppeError, known)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, known)
    # The last one added is the first one met.
    app.add_middleware(ConnectionMiddleware, settings=settings)
    app.add_middleware(
        AccessMiddleware, keys=KeyRing(settings.api_keys), hosts=Hosts(settings.allowed_hosts)
    )
    if settings.cors_origins:
        # Outside the keys: a browser's preflight carries none.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=[
                "authorization",
                "content-type",
                "last-event-id",
                "x-api-key",
                "x-request-id",
                ASKED,
            ],
            expose_headers=["retry-after", "retry-after-ms", "x-request-id", ASKED, TOKEN],
        )
    return app


def _answer(request: Request, problem: Problem) -> Response:
    body = envelope(problem, request.url.path)
    return JSONAnswer(body, status_code=problem.status, headers=problem.headers())


def _http_problem(request: Request, error: HTTPException) -> Problem:
    if error.status_code == 404:
        return Problem(404, f"there is no {request.url.path[:200]!r} here", code="not_found")
    if error.status_code == 405:
        return Problem(405, f"not a method of {request.url.path[:200]!r}", code="bad_method")
    if error.status_code == 400:
        return Problem(400, "the body cannot be read as JSON", code="invalid_json")
    return Problem(error.status_code, str(error.detail), code="http_error")
