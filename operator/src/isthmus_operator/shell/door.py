"""Listening where anybody in the cluster can connect: connections are few, and no address keeps the others out.

A connection that only waits costs a quarter of a megabyte once TLS has begun on it, so that a single pod could take all
of the operator's memory with them. aiohttp and asyncio bound neither their number nor how long they say nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

MOST = 128
MOST_OF_ONE = 48
"""Of one address. An API server opens one for each request that it asks about at the same time."""
HANDSHAKE_S = 5.0
ENDING_S = 2.0
"""How long requests may go on after the end."""
SHORT_OF_DESCRIPTORS_S = 0.2
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, eq=False)
class _Guest:
    """One connection. busy: requests that are being answered on it."""

    host: str
    connection: socket.socket
    setting_up: asyncio.Task[None] | None = None
    transport: asyncio.BaseTransport | None = None
    busy: int = 0

    @property
    def is_gone(self) -> bool:
        return self.connection.fileno() == -1

    def leave(self) -> None:
        """End it, whatever it does."""
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()
        elif self.setting_up is not None:
            self.setting_up.cancel()
        self.connection.close()


@dataclass(slots=True)
class _Guests:
    """Connections, in the order in which they came."""

    there: list[_Guest] = field(default_factory=list)

    def has_room_for(self, host: str) -> bool:
        """Whether one more of `host` may come, after another has given way to it where there are enough.

        Of one address those give way on which nothing is asked, the oldest first, and where all are busy the new one
        does not come. Of all addresses, the one that has most gives one of its own.
        """
        self.there = [one for one in self.there if not one.is_gone]
        if sum(one.host == host for one in self.there) >= MOST_OF_ONE:
            return self._dismiss(one for one in self.there if one.host == host and not one.busy)
        if len(self.there) < MOST:
            return True
        most, _ = Counter(one.host for one in self.there).most_common(1)[0]
        return self._dismiss(sorted((one for one in self.there if one.host == most), key=lambda one: one.busy > 0))

    def _dismiss(self, candidates: Iterable[_Guest]) -> bool:
        for guest in candidates:
            guest.leave()
            self.there.remove(guest)
            return True
        return False

    def of(self, transport: asyncio.BaseTransport | None) -> _Guest | None:
        """Whose transport it is."""
        return next((one for one in self.there if transport is not None and one.transport is transport), None)


@asynccontextmanager
async def listening(
    handlers: Mapping[tuple[str, str], Handler], host: str, port: int, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve `handlers`, by method and path, until the context ends; yields the port. OSError: it cannot be had."""
    guests = _Guests()

    @web.middleware
    async def mark(request: web.Request, handler: Handler) -> web.StreamResponse:
        guest = guests.of(request.transport)
        if guest is None:
            return await handler(request)
        guest.busy += 1
        try:
            return await handler(request)
        finally:
            guest.busy -= 1

    app = web.Application(middlewares=[mark])
    app.add_routes([web.route(method, path, handler) for (method, path), handler in handlers.items()])
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=ENDING_S)
    await runner.setup()
    try:
        with _bound(host, port) as listener:
            accepting = asyncio.create_task(_accept(listener, runner, guests, tls))
            try:
                yield int(listener.getsockname()[1])
            finally:
                accepting.cancel()
                await asyncio.wait((accepting,))
    finally:
        await runner.cleanup()
        for guest in guests.there:
            guest.leave()


def _bound(host: str, port: int) -> socket.socket:
    ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(MOST)
    except OSError:
        listener.close()
        raise
    return listener


async def _accept(listener: socket.socket, runner: web.AppRunner, guests: _Guests, tls: ssl.SSLContext | None) -> None:
    loop = asyncio.get_running_loop()
    while True:
        # Where one waits already, accepting it does not let others run.
        await asyncio.sleep(0)
        try:
            connection, address = await loop.sock_accept(listener)
        except OSError as error:
            # Of a connection that has ended already, or of the process, which others have to mend.
            if error.errno in _SHORTAGES:
                _log.warning("cannot accept connections: %s", error.strerror)
                await asyncio.sleep(SHORT_OF_DESCRIPTORS_S)
            continue
        host = str(address[0])
        if not guests.has_room_for(host):
            connection.close()
            continue
        guest = _Guest(host, connection)
        guests.there.append(guest)
        guest.setting_up = asyncio.create_task(_set_up(guest, runner, tls))


async def _set_up(guest: _Guest, runner: web.AppRunner, tls: ssl.SSLContext | None) -> None:
    assert runner.server is not None
    within = HANDSHAKE_S if tls is not None else None
    # What fails here is a handshake, and a guest that fails at it is not worth a word.
    with contextlib.suppress(OSError, asyncio.CancelledError):
        guest.transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            runner.server, guest.connection, ssl=tls, ssl_handshake_timeout=within
        )
        return
    guest.connection.close()
