"""What comes in is bounded: connections, heads, the time a request may take to arrive, and the size of its body."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config import ServerConfig
from ..errors import InvalidRequest

ACCOUNT = "isthmus.body.account"
"""Extension of the ASGI scope: its `add` is called with the size of each decoded piece, and raises where there is no
room for it; its `whole` after the last."""
_PIECE = 64 << 10
"""Bytes that are inflated on the event loop at a time: a fraction of a millisecond."""
_LARGE_PIECE = 1 << 20
_WBITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one port, every path alike."""

    max_connections: int = 16_384
    """Fewer where the process may not open enough descriptors for them (`admission.connections_within`)."""
    max_connections_per_address: int = 8_192
    """Half of all by default: everybody may come from the one address of a gateway."""
    max_body_memory: int = 256 << 20
    """Bytes of all bodies that arrive or are not planned yet; of one address three quarters."""
    max_unread: int = 256 << 20
    """Bytes of all answers that clients have not read."""
    max_head_bytes: int = 16 << 10
    max_headers: int = 128
    """Lines of a head: each takes some 200 bytes, however short."""
    arrival_s: float = 30.0
    """From a request's first byte to its last."""
    keep_alive_s: float = 620.0
    """Between two requests, and before the first: longer than load balancers keep idle connections, so that it is
    theirs to close them."""
    stuck_s: float = 60.0
    """How long a client may read nothing of the last that is written to it."""
    sweep_s: float = 5.0
    """How often all of them are looked at: one timer for all connections."""


def limits_of(config: ServerConfig) -> Limits:
    """Those that the command line sets."""
    return Limits(
        max_connections=config.max_connections,
        max_connections_per_address=config.max_connections_per_address,
        max_body_memory=config.max_body_memory_bytes,
    )


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
                account = scope.get("extensions", {}).get(ACCOUNT)
                receive = _Body(receive, limit, length, encoding, account).receive
        await self._app(scope, receive, send)


class _Body:
    def __init__(
        self,
        receive: Receive,
        limit: int,
        length: int,
        encoding: bytes,
        account: Mapping[str, Callable[..., None]] | None,
    ) -> None:
        self._receive = receive
        self._limit = limit
        self._length = length
        self._encoding = encoding
        self._account = account
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
            body = await self._decode(body, last=not message["more_body"])
        self._size += len(body)
        if self._size > self._limit:
            self._refuse(self._size)
        return {**message, "body": body}

    async def _decode(self, data: bytes, *, last: bool) -> bytes:
        decoder = self._decoder
        assert decoder is not None
        # One byte more than there is room for tells that it is too large.
        room = self._limit - self._size + 1
        try:
            parts = [self._counted(decoder.decompress(data, min(room, _PIECE)))]
            while decoder.unconsumed_tail and (left := room - sum(map(len, parts))) > 0:
                part = await asyncio.to_thread(decoder.decompress, decoder.unconsumed_tail, min(left, _LARGE_PIECE))
                parts.append(self._counted(part))
        except zlib.error as e:
            raise InvalidRequest(f"the body cannot be read: {e}") from e
        body = b"".join(parts)
        if decoder.unused_data or (last and not decoder.eof and self._size + len(body) <= self._limit):
            raise InvalidRequest(f"the body cannot be read: it is not one complete {self._encoding.decode()} stream")
        if last and self._account is not None:
            self._account["whole"]()
        return body

    def _counted(self, part: bytes) -> bytes:
        if self._account is not None:
            self._account["add"](len(part))
        return part

    def _refuse(self, size: int) -> None:
        raise BodyTooLarge(f"the body has {size} bytes or more, the limit is {self._limit}; shorten the prompt")
