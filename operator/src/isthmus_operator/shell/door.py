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
from dataclasses import dataclass

from aiohttp import web

MOST = 128
MOST_OF_ONE = 48
"""Of one address. An API server opens one for each request that it asks about at the same time."""
USUAL_ROOM = 32
"""Connections that wait before a full door, each a descriptor and nothing else; three in four may be of one address."""
WAIT_S = 5.0
"""How long one waits there."""
QUIET_S = 0.1
"""Whoever has said nothing for so long gives way to who waits: a request may be on its way."""
SHAKING_S = 1.0
"""The same of who has begun a handshake: on a busy machine the answers of both sides take their time."""
LOOK_S = 0.05
HANDSHAKE_S = 5.0
ENDING_S = 2.0
"""How long requests may go on after the end."""
SHORT_OF_DESCRIPTORS_S = 0.2
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, eq=False)
class _Guest:
    """One connection. since: when it began to wait, came in, began its handshake, ended it, or was answered last; busy:
    requests that are being answered on it."""

    host: str
    connection: socket.socket
    since: float
    setting_up: asyncio.Task[None] | None = None
    transport: asyncio.BaseTransport | None = None
    is_shaking: bool = False
    busy: int = 0

    @property
    def is_gone(self) -> bool:
        return self.connection.fileno() == -1

    def is_quiet(self, now: float, *, patient: bool) -> bool:
        """Whether nothing has been asked on it for a while, or, without patience, now; what nobody has read yet
        included."""
        within = (SHAKING_S if self.is_shaking else QUIET_S) if patient else 0.0
        if self.busy or now < self.since + within:
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:  # nothing is there
            return True

    def leave(self) -> None:
        """End it, whatever it does."""
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()
        elif self.setting_up is not None:
            self.setting_up.cancel()
            return  # and closes it: a descriptor that is listened on must not be somebody else's meanwhile
        self.connection.close()


class _Guests:
    """Connections inside and before the door, each in the order in which they came. `room`: of those before it."""

    def __init__(self, room: int) -> None:
        self.inside: list[_Guest] = []
        self.waiting: list[_Guest] = []
        self.news = asyncio.Event()
        """Somebody has been answered, or has begun to wait."""
        self._room = room

    def come(self, guest: _Guest, now: float) -> list[_Guest]:
        """One more is at the door; returns who comes in. Where too many wait, one of the address that has most there
        leaves, the newest."""
        self.waiting.append(guest)
        entered = self.let_in(now)
        if self._too_many_wait():
            entered += self.let_in(now, patient=False)
        while host := self._too_many_wait():
            last = max(index for index, one in enumerate(self.waiting) if one.host == host)
            self.waiting.pop(last).leave()
        return entered

    def let_in(self, now: float, *, patient: bool = True) -> list[_Guest]:
        """Those that come in now, after others have given way to them where there are enough.

        Of one address those give way on which nothing is asked, the oldest first, and where all are busy the new one
        waits. Of all addresses, the one that has most gives one of its own.
        """
        self.inside = [one for one in self.inside if not one.is_gone]
        count = Counter(one.host for one in self.inside)
        full: set[str] = set()
        entered, left = [], []
        for guest in self.waiting:
            if now > guest.since + WAIT_S:
                guest.leave()
            elif guest.host in full or not self._has_room_for(guest.host, count, now, patient):
                full.add(guest.host)
                left.append(guest)
            else:
                guest.since = now
                count[guest.host] += 1
                self.inside.append(guest)
                entered.append(guest)
        self.waiting = left
        return entered

    async def leave(self) -> None:
        """Returns when none of them is being set up any more."""
        for guest in (*self.inside, *self.waiting):
            guest.leave()
        if ending := [one.setting_up for one in self.inside if one.setting_up is not None]:
            await asyncio.wait(ending)

    def of(self, transport: asyncio.BaseTransport | None) -> _Guest | None:
        """Whose transport it is."""
        return next((one for one in self.inside if transport is not None and one.transport is transport), None)

    def _too_many_wait(self) -> str:
        """The address of which one has to leave; empty if nobody has to."""
        if not self.waiting:
            return ""
        host, most = Counter(one.host for one in self.waiting).most_common(1)[0]
        return host if most > self._room * 3 // 4 or len(self.waiting) > self._room else ""

    def _has_room_for(self, host: str, count: Counter[str], now: float, patient: bool) -> bool:
        own = (one for one in self.inside if one.host == host and one.is_quiet(now, patient=patient))
        if count[host] >= MOST_OF_ONE:
            return self._dismiss(own, count)
        if len(self.inside) < MOST:
            return True
        most, there = count.most_common(1)[0]
        if count[host] >= there:
            return self._dismiss(own, count)
        theirs = (one for one in self.inside if one.host == most)
        return self._dismiss(sorted(theirs, key=lambda one: one.busy > 0), count)

    def _dismiss(self, candidates: Iterable[_Guest], count: Counter[str]) -> bool:
        for guest in candidates:
            guest.leave()
            self.inside.remove(guest)
            count[guest.host] -= 1
            return True
        return False


@asynccontextmanager
async def listening(
    handlers: Mapping[tuple[str, str], Handler],
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    room: int = USUAL_ROOM,
) -> AsyncIterator[int]:
    """Serve `handlers`, by method and path, until the context ends; yields the port. OSError: it cannot be had.

    `room`: connections that may wait until others have been answered
    """
    guests, clock = _Guests(room), asyncio.get_running_loop().time

    @web.middleware
    async def mark(request: web.Request, handler: Handler) -> web.StreamResponse:
        guest = guests.of(request.transport)
        if guest is None:
            return await handler(request)
        guest.busy += 1
        try:
            answer = await handler(request)
        finally:
            guest.busy -= 1
            guest.since = clock()
            guests.news.set()
        if any(one.host == guest.host for one in guests.waiting):
            # It says so, and nobody asks on it while it ends.
            answer.force_close()
        return answer

    app = web.Application(middlewares=[mark])
    app.add_routes([web.route(method, path, handler) for (method, path), handler in handlers.items()])
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=ENDING_S)
    await runner.setup()
    try:
        with _bound(host, port) as listener:
            tasks = [
                asyncio.create_task(_accept(listener, runner, guests, tls)),
                asyncio.create_task(_let_in(runner, guests, tls)),
            ]
            for task in tasks:
                task.add_done_callback(_ended)
            try:
                yield int(listener.getsockname()[1])
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
    finally:
        await runner.cleanup()
        await guests.leave()


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("connections are not accepted any more", exc_info=error)


def _bound(host: str, port: int) -> socket.socket:
    ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # by `::` all addresses, whatever this system's default is
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
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
        now = loop.time()
        for guest in guests.come(_Guest(str(address[0]), connection, now), now):
            _begin(guest, runner, tls)
        if guests.waiting:
            guests.news.set()  # somebody has to look again, though nobody else comes or is answered


async def _let_in(runner: web.AppRunner, guests: _Guests, tls: ssl.SSLContext | None) -> None:
    """Those that wait, when others have been answered, have left or say nothing."""
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S if guests.waiting else None):
                await guests.news.wait()
        guests.news.clear()
        for guest in guests.let_in(loop.time()):
            _begin(guest, runner, tls)


def _begin(guest: _Guest, runner: web.AppRunner, tls: ssl.SSLContext | None) -> None:
    if guest.is_gone:  # it has given way to one that came in after it
        return
    guest.setting_up = asyncio.create_task(_set_up(guest, runner, tls))
    guest.setting_up.add_done_callback(lambda _: guest.connection.close() if guest.transport is None else None)


async def _set_up(guest: _Guest, runner: web.AppRunner, tls: ssl.SSLContext | None) -> None:
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    # What fails here is a handshake, and a guest that fails at it is not worth a word.
    with contextlib.suppress(OSError, asyncio.CancelledError):
        if tls is None:
            guest.transport, _ = await loop.connect_accepted_socket(runner.server, guest.connection)
            return
        # Before it says something there is nothing to answer, and no need of what TLS takes.
        async with asyncio.timeout(HANDSHAKE_S):
            await _first_word(guest.connection)
        guest.since, guest.is_shaking = loop.time(), True
        guest.transport, _ = await loop.connect_accepted_socket(
            runner.server, guest.connection, ssl=tls, ssl_handshake_timeout=HANDSHAKE_S
        )
        guest.since, guest.is_shaking = loop.time(), False


async def _first_word(connection: socket.socket) -> None:
    """Returns when there is something to read on it, or its end."""
    loop, there = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, there.set)
    try:
        await there.wait()
    finally:
        loop.remove_reader(connection)
