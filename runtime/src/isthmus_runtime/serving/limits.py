"""What comes in is bounded: connections, heads, the time a request may take to arrive, and the size of its body."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import InvalidRequest

_WBITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one port, every path alike."""

    max_connections: int = 16_384
    max_head_bytes: int = 16 << 10
    arrival_s: float = 30.0
    """From a request's first byte to its last."""
    keep_alive_s: float = 620.0
    """Between two requests, and before the first: longer than load balancers keep idle connections, so that it is
    theirs to close them."""
    sweep_s: float = 5.0
    """How often both are looked at: one timer for all connections."""


class TooSlow(InvalidRequest):
    """A request that did not arrive in time."""

    status = 408
    code = "request_timeout"


class HeadTooLarge(InvalidRequest):
    """A request line and headers (or trailers) of more bytes than are taken."""

    status = 431
    code = "request_header_fields_too_large"


class BodyTooLarge(InvalidRequest):
    """A body of more bytes than are taken."""

    status = 413
    code = "request_too_large"


class UnknownEncoding(InvalidRequest):
    """A body in a Content-Encoding that is not read."""

    status = 415
    code = "unsupported_content_encoding"


class BodyLimit:
    """ASGI middleware: `receive` raises for a body beyond the limit, and decodes gzip and deflate within it.

    It raises when the body is read, so that the handler's own errors (a missing key) go first and its books are kept.
    """

    def __init__(self, app: ASGIApp, *, public: int, internal: int) -> None:
        """Most bytes of a body, decoded; `internal` of paths under /internal/."""
        self._app = app
        self._public = public
        self._internal = internal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            length, encoding = -1, b""
            for name, value in scope["headers"]:
                if name == b"content-length":
                    length = int(value)
                elif name == b"content-encoding" and (value := value.strip().lower()) != b"identity":
                    encoding += b"," + value if encoding else value
            limit = self._internal if scope["path"].startswith("/internal/") else self._public
            # A body of a known length needs no counting: the parser ends it there.
            if length > limit or length < 0 or encoding:
                receive = _Body(receive, limit, length, encoding).receive
        await self._app(scope, receive, send)


class _Body:
    def __init__(self, receive: Receive, limit: int, length: int, encoding: bytes) -> None:
        self._receive = receive
        self._limit = limit
        self._length = length
        self._encoding = encoding
        wbits = _WBITS.get(encoding)
        self._decoder = None if wbits is None else zlib.decompressobj(wbits)
        self._size = 0

    async def receive(self) -> Message:
        """As of ASGI. Raises InvalidRequest."""
        if self._length > self._limit:
            self._refuse(self._length)
        if self._encoding and self._decoder is None:
            shown = self._encoding.decode("latin-1")
            raise UnknownEncoding(
                f"Content-Encoding: {shown!r} is not supported; send the body uncompressed, or as gzip or deflate",
                param="Content-Encoding",
            )
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        body: bytes = message["body"]
        if self._decoder is not None:
            body = self._decode(body, last=not message["more_body"])
        self._size += len(body)
        if self._size > self._limit:
            self._refuse(self._size)
        return {**message, "body": body}

    def _decode(self, data: bytes, *, last: bool) -> bytes:
        decoder = self._decoder
        assert decoder is not None
        try:
            # One byte more than there is room for tells that it is too large.
            body = decoder.decompress(data, self._limit - self._size + 1)
        except zlib.error as e:
            raise InvalidRequest(f"the body cannot be read: {e}") from e
        if decoder.unused_data or (last and not decoder.eof and self._size + len(body) <= self._limit):
            raise InvalidRequest(f"the body cannot be read: it is not one complete {self._encoding.decode()} stream")
        return body

    def _refuse(self, size: int) -> None:
        raise BodyTooLarge(f"the body has {size} bytes or more, the limit is {self._limit}; shorten the prompt")
