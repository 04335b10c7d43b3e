"""A small HTTP/1.1 client for calls to engines: pooled connections, and only httptools between socket and reader.

A router spends most of its time on the bytes of engines, and a general HTTP client spends most of that on what engines
never send. This one speaks what they do: JSON out; a status line, headers and a body with Content-Length or chunks in.
Anything else ends the connection with `BadAnswer`. Engines are peers found by discovery, not the internet; sizes are
bounded all the same.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserCallbackError, HttpParserError, HttpResponseParser

from .patience import Patience

CONNECT_TIMEOUT_S = 1.0
KEEP_ALIVE_S = 30.0
"""Idle connections older than this are not used again: an engine may be about to close them (after 75 s or more)."""
_DISCARD_TIMEOUT_S = 2.0
_PROBES = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 5000}
"""A connection can vanish without a word while its engine answers others: a middlebox forgot it, or its end was lost
on the way. The kernel finds out in about 5 s; a stream that waits for tokens would only at the request's deadline."""
_MAX_HEAD = 64 << 10
_LARGE = 1 << 16
"""Bytes of a body that is not copied to be sent."""
_HIGH_WATER = 64 << 10
"""Bytes held for a reader that is slower than the engine before the socket is left unread, and of the kernel's for it:
a client that reads nothing has as many connections here as choices, which no book counts."""


class BadAnswer(ConnectionError):
    """The peer sent something that is no HTTP answer of an engine."""


class Exchange(asyncio.Protocol):
    """One connection, and the one call that is on it. Made and pooled by `Wire`.

    After `status` is set, `readany` until it returns b"" (or `read`), then `release`. `close` at any time.
    """

    def __init__(self, idle: deque[Exchange], loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        """HTTP status of the answer; 0 while its head has not arrived."""
        self.idle_since = 0.0
        self.usable = False
        """Whether another call may be made on the connection."""
        self._idle = idle
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._arrived: Callable[[], None] | None = None
        self._error: OSError | None = None
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        """Refers back to this: dropped with the connection, or what was not read would wait for the collector."""
        self._unread = 0
        """Bytes of which the parser has made neither a head nor a part of a body."""
        self._framed = False
        self._body: list[bytes] = []
        self._held = 0
        self._paused = False
        self._ended = True
        self._discard: asyncio.TimerHandle | None = None

    # -------------------------------------------------------------------------------------------------------- caller

    def set_up(self) -> None:
        """Let the kernel look after the connection while nothing comes, and hold little of what does."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is None:
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _HIGH_WATER)
        for name, value in _PROBES.items():
            if (option := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def ask(self, head: bytes, body: Sequence[bytes]) -> None:
        """Send a request, with the parts of its body: while large ones wait to be sent, calls with the same part have
        it once."""
        assert self._ended and self._transport is not None
        self.status, self._ended = 0, False
        size = sum(map(len, body))
        parts = b"%b%d\r\n\r\n" % (head, size), *body
        if size > _LARGE:
            self._transport.writelines(parts)
        else:
            self._transport.write(b"".join(parts))

    async def answered(self) -> None:
        """Wait for the head of the answer. Raises OSError."""
        while not self.status:
            await self._wait()

    async def readany(self) -> bytes:
        """Some bytes of the body, b"" after its end. Raises OSError when the connection broke before that."""
        while not self._body:
            if self._ended:
                return b""
            await self._wait()
        return self.here()

    def follow(self, arrived: Callable[[], None] | None) -> None:
        """Have `arrived`, which must not raise, called whenever bytes have come, or the answer or the connection has
        ended, instead of waking a reader; None: no longer."""
        self._arrived = arrived

    @property
    def over(self) -> bool:
        """No more bytes will come."""
        return self._ended or self._error is not None

    def here(self) -> bytes:
        """What has arrived of the body and was not read, maybe nothing."""
        body = self._body
        data = body[0] if len(body) == 1 else b"".join(body)
        body.clear()
        self._held = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def read(self) -> bytes:
        """The rest of the body. Raises OSError."""
        parts = []
        while part := await self.readany():
            parts.append(part)
        return b"".join(parts)

    def release(self) -> None:
        """The caller needs nothing more of this answer: the connection serves another call once the answer is over."""
        if self._ended:
            self._put_back()
        elif self._discard is None and not self.closed:
            self._discard = self._loop.call_later(_DISCARD_TIMEOUT_S, self.close)
            self._drop_body()

    def close(self) -> None:
        """End the connection at once; whoever waits for it gets ConnectionAbortedError."""
        self.usable = False
        self._fail(ConnectionAbortedError("the connection was closed by the router"))
        if self._transport is not None:
            self._transport.abort()

    @property
    def closed(self) -> bool:
        """Whether the connection is gone."""
        return self._error is not None or self._transport is None

    # ------------------------------------------------------------------------------------------------------ protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.usable = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._parser = None
        self.usable = False
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the peer closed the connection"))

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        assert parser is not None  # the connection is there
        self._unread += len(data)
        try:
            parser.feed_data(data)
            if self._unread > _MAX_HEAD:
                raise BadAnswer(f"{self._unread} bytes arrived that are neither a head nor part of a body")
        except (HttpParserError, BadAnswer) as e:
            cause = e.__context__ if isinstance(e, HttpParserCallbackError) else e
            self._fail(cause if isinstance(cause, BadAnswer) else BadAnswer(f"not an HTTP answer: {e}"))
            self.close()
            return
        if self._discard is not None:
            self._discard_body(self._discard)
        elif self._held > _HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self._arrived is not None:
            self._arrived()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -------------------------------------------------------------------------------------------------------- parser

    def on_message_begin(self) -> None:
        if self._ended:
            raise BadAnswer("bytes that belong to no call")
        self._framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        if parser.get_http_version() != "1.1" or not self._framed:
            raise BadAnswer("the answer is not HTTP/1.1 with chunks or a Content-Length")
        self.status = parser.get_status_code()
        self.usable = parser.should_keep_alive()
        self._unread = 0

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._held += len(body)
        self._unread = 0

    def on_message_complete(self) -> None:
        self._ended = True
        self._unread = 0

    # ------------------------------------------------------------------------------------------------------- internals

    async def _wait(self) -> None:
        if self._error is not None:
            raise copy(self._error)  # itself it would hold this, by its frames
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _fail(self, error: OSError) -> None:
        if self._error is None:
            self._error = error
        if self._discard is not None:
            self._discard.cancel()
            self._discard = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(copy(self._error))
        if self._arrived is not None:
            self._arrived()

    def _drop_body(self) -> None:
        self._body.clear()
        self._held = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def _discard_body(self, timer: asyncio.TimerHandle) -> None:
        self._drop_body()
        if self._ended:
            timer.cancel()
            self._discard = None
            self._put_back()

    def _put_back(self) -> None:
        self._drop_body()
        if not self.usable or self.closed:
            self.close()
            return
        now = self.idle_since = self._loop.time()
        idle = self._idle
        idle.append(self)
        while idle and (idle[0].closed or now - idle[0].idle_since > KEEP_ALIVE_S):
            idle.popleft().close()


class Wire:
    """Connections to all engines. One for a router."""

    def __init__(self, authorization: Callable[[], str] | None = None) -> None:
        """`authorization`: value of that header as of now, "" for none."""
        self._authorization = authorization
        self._loop = asyncio.get_running_loop()
        self._idle: dict[str, deque[Exchange]] = {}
        self._heads: dict[tuple[str, str], bytes] = {}

    async def post(self, url: str, path: str, body: Sequence[bytes], more: bytes = b"") -> Exchange:
        """POST JSON and return at the answer's head. Raises OSError; a cancelled call leaves no connection behind.

        `more`: further header lines, each ended by CRLF.
        """
        exchange = self.idle(url) or await self.connect(url)
        try:
            self.ask(exchange, url, path, body, more)
            del body  # maybe megabytes, which would wait for the answer
            await exchange.answered()
        except BaseException:
            exchange.close()
            raise
        return exchange

    def ask(self, exchange: Exchange, url: str, path: str, body: Sequence[bytes], more: bytes = b"") -> None:
        """POST JSON on a connection, whose `answered` waits for the answer's head."""
        head = self._heads.get((url, path))
        if head is None:
            head = self._heads[url, path] = (
                f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
            ).encode()
        shown = "" if self._authorization is None else self._authorization()
        proof = b"Authorization: %b\r\n" % shown.encode() if shown else b""
        exchange.ask(b"%b%b%bContent-Length: " % (head, proof, more), body)

    def forget(self, url: str) -> None:
        """The engine is no longer in the fleet: close its idle connections."""
        for exchange in self._idle.pop(url, ()):
            exchange.close()
        for key in [key for key in self._heads if key[0] == url]:
            del self._heads[key]

    def close(self) -> None:
        """Close all idle connections."""
        for url in tuple(self._idle):
            self.forget(url)

    def idle(self, url: str) -> Exchange | None:
        """A connection from an earlier call; the caller's until it is released."""
        idle = self._idle.get(url)
        while idle:
            exchange = idle.pop()
            if not exchange.closed and self._loop.time() - exchange.idle_since <= KEEP_ALIVE_S:
                return exchange
            exchange.close()
        return None

    async def connect(self, url: str) -> Exchange:
        """A new connection, the caller's until it is released. Raises OSError."""
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        idle = self._idle.setdefault(url, deque())
        try:
            async with Patience(CONNECT_TIMEOUT_S):
                _, exchange = await self._loop.create_connection(
                    lambda: Exchange(idle, self._loop), parts.hostname, parts.port
                )
        except TimeoutError as e:
            raise TimeoutError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from e
        exchange.set_up()
        return exchange
