"""One HTTP request and its answer, whatever server it came in on: what the API's hot handlers are written against.

`WebCall` is a call on aiohttp's server; `frontdoor.py` has one without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from .errors import InvalidRequest, RequestError


class BodyTooLarge(InvalidRequest):
    """A body of more bytes than are taken."""

    status = 413
    code = "request_too_large"

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the body has {size} bytes or more, the limit is {limit}; shorten the prompt")


class Call(Protocol):
    """Answered once: `reply`, or `begin`, any number of `write` and `end`.

    The task that works on it is cancelled when the client leaves.
    """

    @property
    def path(self) -> str:
        """Of the URL."""

    @property
    def authorization(self) -> str:
        """The header's value, "" without one."""

    @property
    def begun(self) -> bool:
        """Whether the head of the answer is on its way: no other status can follow."""

    async def read(self, limit: int) -> bytes:
        """The body. Raises BodyTooLarge beyond `limit` bytes, InvalidRequest when it cannot be decoded."""

    def reply(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answer in one piece."""

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Send the head of a 200 whose body follows in pieces."""

    async def write(self, data: bytes) -> None:
        """Send a piece; returns when the client keeps up. Raises ConnectionResetError when it has left."""

    async def end(self) -> None:
        """The answer is complete. Raises ConnectionResetError."""

    def abort(self) -> None:
        """Cut the connection: a broken answer must not look complete."""


Serve = Callable[[Call], Awaitable[None]]
"""Answers a call, whatever happens."""


class WebCall:
    """A call on aiohttp's server. The handler returns `response`."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse = web.StreamResponse()

    @property
    def path(self) -> str:
        """Of the URL."""
        return self._request.path

    @property
    def authorization(self) -> str:
        """The header's value, "" without one."""
        return self._request.headers.get("Authorization", "")

    @property
    def begun(self) -> bool:
        """Whether the head of the answer is on its way."""
        return self.response.prepared

    async def read(self, limit: int) -> bytes:
        """The body. Raises BodyTooLarge beyond `limit` bytes, InvalidRequest when it cannot be decoded."""
        size = self._request.content_length or 0
        if size > limit:
            raise BodyTooLarge(size, limit)
        content = self._request.content
        body = bytearray()
        try:
            if content.is_eof():  # a short body is here with its head
                body += content.read_nowait()
            else:
                async for part in content.iter_any():
                    body += part
                    if len(body) > limit:
                        break
        except RequestPayloadError as e:
            raise InvalidRequest(f"the body cannot be read: {payload_fault(e)}") from e
        if len(body) > limit:
            raise BodyTooLarge(len(body), limit)
        return bytes(body)

    def reply(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answer in one piece."""
        self.response = web.Response(status=status, headers=headers, body=body)

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Send the head of a 200 whose body follows in pieces."""
        self.response.headers.update(headers)
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Send a piece; returns when the client keeps up."""
        await self.response.write(data)

    async def end(self) -> None:
        """The answer is complete."""
        await self.response.write_eof()

    def abort(self) -> None:
        """Cut the connection."""
        if self._request.transport is not None:
            self._request.transport.abort()


def error_answer(error: RequestError) -> tuple[int, dict[str, str], bytes]:
    """`error` as an OpenAI error: status, headers (Retry-After where it has one) and body."""
    headers = {"Content-Type": "application/json"}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return error.status, headers, json.dumps({"error": error.to_json()}).encode()


def payload_fault(error: RequestPayloadError) -> str:
    """What is wrong with a body, without aiohttp's status line before it."""
    return str(error).partition(":")[2].strip() or str(error)


def web_handler(serve: Serve) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """`serve` as a route of aiohttp."""

    async def handler(request: web.Request) -> web.StreamResponse:
        call = WebCall(request)
        await serve(call)
        return call.response

    return handler
