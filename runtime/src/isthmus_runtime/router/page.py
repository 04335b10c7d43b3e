"""The page at `/`: a chat and the state of the service, for people. Static files of this package, no build step.

The page itself is for everybody, as it holds nothing: what it shows comes from the API and from /status, both of which
ask for a key where there are keys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import sha256
from importlib.resources import files

from fastapi import FastAPI, Request
from starlette.responses import Response

from ..serving.app import errors
from .status import ServiceStatus

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    # Text of models and of other people's errors is on this page: nothing in it may run, load or leave.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again, and answered by 304 while it is the same
}


def add_page(app: FastAPI, status: Callable[[], ServiceStatus], check: Callable[[Request], object]) -> None:
    """Add `/` with its style and script, and /status.

    Args:
        status: the service now.
        check: raises a RequestError for a request that has no valid key.
    """
    for path, (name, media_type) in _FILES.items():
        content = files(__package__).joinpath("static", name).read_bytes()
        app.add_api_route(path, _file(content, media_type), methods=["GET", "HEAD"], include_in_schema=False)

    async def get_status(request: Request) -> ServiceStatus:
        """Engines by role, their load where clients share it, and how KV moves. Names no address."""
        check(request)
        return status()

    app.add_api_route("/status", get_status, tags=["server"], responses=errors(401))


def _file(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, "ETag": tag}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return serve
