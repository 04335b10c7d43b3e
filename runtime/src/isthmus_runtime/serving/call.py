"""One request and its answer, for handlers that write the answer piece by piece."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from ..errors import RequestError, Unauthenticated, unforeseen

WHOLE = "isthmus.answer.whole"
"""Extension of the ASGI scope: a message that begins an answer may have all of the body under this name. No other
follows it then."""
PIECE = "isthmus.answer.piece"
"""Extension of the ASGI scope: its `write` takes a piece of an answer in pieces and tells whether that is on its way,
which it is not where there is something to wait for first: that is for `send`. Raises ConnectionResetError."""

DROPPED = "isthmus.body.dropped"
"""Extension of the ASGI scope: to its `tell` the body, which was read whole, is needed no more; what is held instead,
and whose it is, is told with it."""


class Cut(Exception):
    """Raised by a handler to cut the connection: a broken answer must not look complete."""


class Call(Request):
    """Answered once: `reply`, or `begin`, any number of `write` and `end`.

    The task that works on it is cancelled when the client leaves. Writing raises ConnectionResetError where that is
    noticed first.
    """

    begun = False
    """Whether the head of the answer is on its way: no other status can follow."""

    @property
    def path(self) -> str:
        """Path of the URL."""
        return str(self.scope["path"])

    async def read(self) -> bytes:
        """The body. Raises what the limits on bodies raise (limits.py)."""
        message = await self._receive()
        if message["type"] == "http.request" and not message["more_body"]:
            return bytes(message["body"])
        parts = [message]
        while parts[-1]["type"] == "http.request" and parts[-1]["more_body"]:
            parts.append(await self._receive())
        if parts[-1]["type"] != "http.request":
            raise ConnectionResetError("the client has disconnected")
        return b"".join([part["body"] for part in parts])

    def drop(self, beside: int = 0, who: str = "") -> None:
        """Drop what was read: others' bodies may have its room, however long the answer takes. `beside`:
        bytes that its handler holds and counts, and `who` asked, for the choice of who gives way where memory runs
        short."""
        if (dropped := self.scope.get("extensions", {}).get(DROPPED)) is not None:
            dropped["tell"](beside, who)

    async def reply(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answer in one piece."""
        lines = [*_raw(headers), (b"content-length", b"%d" % len(body))]
        if WHOLE in self.scope.get("extensions", ()):
            self.begun = True
            await self._send({"type": "http.response.start", "status": status, "headers": lines, WHOLE: body})
            return
        await self._start(status, lines)
        await self._send({"type": "http.response.body", "body": body})

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Send the head of a 200 whose body follows in pieces."""
        await self._start(200, _raw(headers))

    async def write(self, data: bytes) -> None:
        """Send a piece; returns when the client keeps up."""
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def writer(self) -> Callable[[bytes], bool]:
        """Sends a piece (not b"") at once, or tells that the client does not keep up, so that it is for `write`: for
        callbacks, which cannot wait."""
        piece = self.scope.get("extensions", {}).get(PIECE)
        return _never if piece is None else piece["write"]

    async def end(self) -> None:
        """The answer is complete."""
        await self._send({"type": "http.response.body"})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _never(data: bytes) -> bool:
    return False


class CallRoute(APIRoute):
    """A route whose endpoint takes a `Call` and answers it itself, piece by piece where it likes. Without dependencies
    to resolve, FastAPI's part of a request is finding the route."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Overrides starlette's."""
        if self.methods and scope["method"] in self.methods:
            await self.endpoint(Call(scope, receive, send))
        else:
            await super().handle(scope, receive, send)


def add_call_route(
    app: FastAPI, path: str, endpoint: Callable[[Call], Awaitable[None]], method: str, **more: Any
) -> None:
    """Add a CallRoute; `more` as of `FastAPI.add_api_route`."""
    app.router.routes.append(CallRoute(path, endpoint, methods=[method], response_model=None, status_code=200, **more))


class Calls:
    """ASGI application of the `CallRoute`s among `routes`, by their exact paths."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._endpoints: dict[tuple[str, str], Callable[[Call], Awaitable[None]]] = {
            (method, route.path): route.endpoint
            for route in routes
            if isinstance(route, CallRoute) and not route.param_convertors
            for method in route.methods or ()
        }

    def has(self, scope: Scope) -> bool:
        """Whether one of them is what a scope asks for."""
        return scope["type"] == "http" and (scope["method"], scope["path"]) in self._endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI. An error that the endpoint lets through is its answer, where none has begun."""
        call = Call(scope, receive, send)
        try:
            await self._endpoints[scope["method"], scope["path"]](call)
        except RequestError as error:
            if call.begun:
                raise
            await call.reply(*error_answer(error))
        except Exception as error:
            if not call.begun and not isinstance(error, Cut | ConnectionError):
                await call.reply(*error_answer(unforeseen(error)))
            raise


def authorization(scope: Scope) -> str:
    """The header's value, "" without one."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return str(value.decode("utf-8", "surrogateescape"))
    return ""


def error_answer(error: RequestError) -> tuple[int, dict[str, str], bytes]:
    """`error` as an OpenAI error: status, headers (Retry-After where it has one) and body."""
    headers = {"content-type": "application/json"}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return error.status, headers, json.dumps({"error": error.to_json()}).encode()


def error_response(error: RequestError) -> Response:
    """`error` as a response."""
    status, headers, body = error_answer(error)
    return Response(body, status, headers)


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
