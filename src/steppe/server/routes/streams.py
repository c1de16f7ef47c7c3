"""``GET /v1/streams/{token}``: a stream, continued after its connection was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Header, Path, Request
from starlette.responses import Response

from steppe.server.disconnect import connection_of
from steppe.server.generation import serving_of
from steppe.server.limits import caller_of
from steppe.server.resume import ASKED, TOKEN
from steppe.server.sse import PING, EventStream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from steppe.server.generation import Run
    from steppe.server.resume import ResumableStream

__all__ = ["router", "streamed"]

router = APIRouter()


@router.get("/v1/streams/{token}", response_class=Response)
async def resume_stream(
    request: Request,
    token: Annotated[str, Path(max_length=64, description=f"From `{TOKEN}` of the answer.")],
    last_event_id: Annotated[
        int, Header(ge=0, lt=2**53, description="The last event that arrived whole; 0 for none.")
    ] = 0,
) -> Response:
    """The events behind the last one that arrived, and those that follow."""
    stream = serving_of(request).streams.find(token, caller_of(request.scope))
    return _read(request, stream, last_event_id, PING)


def streamed(
    request: Request, run: Run, events: AsyncGenerator[bytes], *, ping: bytes = PING
) -> Response:
    """The response that carries ``events``, which are those of ``run``. It ends with its connection
    unless the request asked for more.
    """
    serving = serving_of(request)
    patience = serving.streams.granted(request.headers)
    if patience is None or run.connection.gone:
        return EventStream(events, serving.settings, ping=ping)
    run.outlive()
    stream = serving.streams.add(events, owner=caller_of(request.scope), patience=patience)
    return _read(request, stream, 0, ping)


def _read(request: Request, stream: ResumableStream, after: int, ping: bytes) -> Response:
    reader = stream.open(after)
    connection_of(request.scope).on_gone(reader.leave)
    headers = {TOKEN: stream.token, ASKED: f"{stream.patience:g}"}
    return EventStream(reader, serving_of(request).settings, ping=ping, headers=headers)
