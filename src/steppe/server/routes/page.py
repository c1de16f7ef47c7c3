"""``GET /``: the live page, as it lies in ``steppe/server/page``. It needs nothing from elsewhere.

The files hold no secret and are served without a key, so that the page can ask for one.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from steppe.server.limits import OPEN_PATHS

__all__ = ["POLICY", "router"]

router = APIRouter(include_in_schema=False)

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the browser lets the page do: run its own script, talk to its own server."""

OPEN_PATHS.update(FILES)


def _serve(path: str, name: str, media_type: str) -> None:
    content = files("steppe.server").joinpath("page", name).read_bytes()
    headers = {
        "content-type": media_type,
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        # Small and local: a page of another version would be worse than one more request.
        "cache-control": "no-cache",
    }

    async def send_file() -> Response:
        return Response(content, headers=headers)

    router.add_api_route(path, send_file, methods=["GET", "HEAD"])


for _path, (_name, _type) in FILES.items():
    _serve(_path, _name, _type)
