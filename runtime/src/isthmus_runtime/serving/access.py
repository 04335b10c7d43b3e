"""Internal routes are for peers: ASGI middleware that asks for their credential before anything else is looked at."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ..credentials import Credentials
from ..errors import AccessDenied, Unauthenticated
from .call import authorization, error_response

INTERNAL = "/internal/"
OF_RUNNING = (b"/internal/commit", b"/internal/abort", b"/internal/drained", b"/internal/ticket")
"""What peers say of requests that run: heard however little memory there is, as it is what lets them end."""


class PeersOnly:
    """Answers 401 or 403 on every path under /internal/, there or not, to whoever is no peer. Bodies stay unread."""

    def __init__(self, app: ASGIApp, *, credentials: Credentials) -> None:
        self._app = app
        self._credentials = credentials

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(INTERNAL):
            try:
                self._credentials.check(authorization(scope))
            except (Unauthenticated, AccessDenied) as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
