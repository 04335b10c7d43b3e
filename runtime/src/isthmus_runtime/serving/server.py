"""A port: uvicorn's server from its start to a graceful end."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Self

import uvicorn
from fastapi import FastAPI

from ..errors import ConfigError
from ..threads import processors, running_pool
from .admission import connections_within
from .in_flight import InFlight
from .limits import Limits
from .memory import MemoryGuard
from .port import PortState
from .protocol import Protocol

_log = logging.getLogger(__name__)
_ABORT_GRACE_S = 2
"""After aborting what is left, how long its last bytes may take to leave."""
_BACKLOG = 1024
_MOST_THREADS = 32
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SCRAPERS = Limits(max_connections=256, max_connections_per_address=32)
"""Of a port of metrics and probes. The kubelet's find room however many a scraper opens."""


class Server(uvicorn.Server):
    """uvicorn's server with our protocol and limits. Signals are `run_app`'s."""

    server_state: PortState

    def __init__(self, app: FastAPI, limits: Limits, memory: MemoryGuard, in_flight: InFlight) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=_log.isEnabledFor(logging.DEBUG),
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_ABORT_GRACE_S,
            )
        )
        self.server_state = PortState(limits, memory, in_flight)
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        self._swept = 0.0

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: uvicorn's Date header, a look at the memory, and from time to time one at all
        connections."""
        now = asyncio.get_running_loop().time()
        self.server_state.relieve()
        if now - self._swept >= self.server_state.limits.sweep_s:
            self._swept = now
            for connection in tuple(self.server_state.connections):
                assert isinstance(connection, Protocol)
                connection.check(now)
            self.server_state.bound_unread()
        return await super().on_tick(counter)

    def leave(self) -> None:
        """The next answer on each connection is its last."""
        self.server_state.leaving = True
        for connection in self.server_state.connections:
            assert isinstance(connection, Protocol)
            connection.leave()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listener and idle connections, then the others when their answer is complete, in time or not."""
        await super().shutdown(sockets)
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()


async def run_app(
    app: FastAPI,
    *,
    host: str,
    port: int,
    drain_timeout_s: float,
    lame_duck_s: float = 0.0,
    in_flight: InFlight | None = None,
    limits: Limits | None = None,
    memory: MemoryGuard | None = None,
    stop: asyncio.Event | None = None,
    on_started: Callable[[int], None] | None = None,
    before_close: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve `app` until SIGTERM, SIGINT or `stop`, then drain.

    The listener stays open while draining, so that probes and peers (drain acknowledgements, aborts) are answered;
    new work is refused by `in_flight`. After that is idle, or after `drain_timeout_s`, or at a second signal, what
    is left is aborted and the listener closed.

    After SIGTERM, but not after a person's SIGINT, requests are still taken for `lame_duck_s` before the drain, each
    answered with `Connection: close`: who balances over several such processes hears of the end later than this one.

    `before_close` runs last, while the listener still answers: what a refused connection would tell peers must be
    true by then. `on_started` gets the bound port (useful with port 0). `memory` is looked at while it serves, and
    refuses by `in_flight`; what it takes at the start is no request's.

    Raises:
        ConfigError: the port cannot be bound.
    """
    stop = asyncio.Event() if stop is None else stop
    in_flight = InFlight() if in_flight is None else in_flight
    memory = MemoryGuard() if memory is None else memory
    in_flight.gate = memory.check_new
    loop = asyncio.get_running_loop()
    listener = _bind(host, port)
    listener.listen(_BACKLOG)
    # As many as it would make by itself.
    loop.set_default_executor(running_pool(min(_MOST_THREADS, processors() + 4), "beside-loop"))
    server = Server(app, _within_descriptors(limits or Limits()), memory, in_flight)
    await server.startup([listener])
    memory.start()
    server.server_state.bound_bodies()
    ticks = asyncio.ensure_future(server.main_loop())
    try:
        with _Signals(stop) as signals:
            if on_started is not None:
                on_started(listener.getsockname()[1])
            await _stopped(stop, ticks)
            in_flight.start_leaving()
            server.leave()
            await _drain(in_flight, signals, lame_duck_s if signals.terminated else 0.0, drain_timeout_s)
    finally:
        in_flight.start_drain()
        if len(in_flight):
            _log.warning("aborting %d requests that did not end in time", len(in_flight))
            in_flight.abort()
        try:
            if before_close is not None:
                await before_close()
        finally:
            ticks.cancel()
            await server.shutdown([listener])
            memory.close()


async def _drain(in_flight: InFlight, signals: _Signals, lame_duck_s: float, drain_timeout_s: float) -> None:
    """As `run_app` says of `lame_duck_s`, then until nothing runs, at most `drain_timeout_s`, or a second signal."""
    if lame_duck_s:
        _log.info("leaving: takes requests for %g s more", lame_duck_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(signals.again.wait(), lame_duck_s)
    in_flight.start_drain()
    _log.info("draining: %d requests, at most %g s", len(in_flight), drain_timeout_s)
    ends = [asyncio.ensure_future(in_flight.wait_idle()), asyncio.ensure_future(signals.again.wait())]
    await asyncio.wait(ends, timeout=drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()


class _Signals:
    """While entered, the first SIGTERM or SIGINT sets `stop`, and a later one `again`."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self.again = asyncio.Event()
        self.terminated = False
        """The first was a SIGTERM."""

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._take, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            self.again.set()
        else:
            self.terminated = number is signal.SIGTERM
            self._stop.set()


async def _stopped(stop: asyncio.Event, ticks: asyncio.Future[None]) -> None:
    """Until `stop` is set. Raises the error of `ticks` where they end before: no limit would hold without them."""
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((stopped, ticks), return_when=asyncio.FIRST_COMPLETED)
    if not stopped.done():
        stopped.cancel()
        ticks.result()


def _within_descriptors(limits: Limits) -> Limits:
    """`limits` that this process has descriptors for, after raising its own bound (1024 is for select(2)) to the most
    that it is allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    able = limits.max_connections if hard == resource.RLIM_INFINITY else connections_within(hard)
    if able < limits.max_connections:
        _log.warning("at most %d connections: this process may open %d files (RLIMIT_NOFILE)", able, hard)
    return replace(limits, max_connections=min(able, limits.max_connections))


@asynccontextmanager
async def beside(app: FastAPI | None, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve `app`, which holds no work, on `--metrics-port` for as long as this is entered: around `run_app`, so that
    probes are answered to the very end. Gives the bound port; None: nothing. ConfigError as from `run_app`.

    If the sweep of its connections breaks, the body is cancelled and its error raised: nothing would be bounded any
    more.
    """
    if app is None:
        yield 0
        return
    listener = _bind(host, port, "--metrics-port")
    listener.listen(_BACKLOG)
    server = Server(app, _SCRAPERS, MemoryGuard(), InFlight())
    await server.startup([listener])
    body = asyncio.current_task()
    assert body is not None
    ticks = asyncio.ensure_future(server.main_loop())
    ticks.add_done_callback(lambda done: None if done.cancelled() else body.cancel())
    try:
        yield int(listener.getsockname()[1])
    except asyncio.CancelledError:
        if ticks.done():
            ticks.result()
        raise
    finally:
        ticks.cancel()
        await server.shutdown([listener])


def check_port(host: str, port: int, flag: str = "--port") -> None:
    """Fail before the slow part of a start when the port is taken. ConfigError as from `run_app`."""
    _bind(host, port, flag).close()


def _bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A bound socket, not listening yet."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted connections inherit it: one that vanished without a word is found out.
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if family == socket.AF_INET6:  # by `::` all addresses, whatever this system's default is
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            found.bind(address)
        except OSError:
            found.close()
            raise
        return found
    except OSError as e:
        raise ConfigError(_bind_problem(host, port, flag, e)) from e


def _bind_problem(host: str, port: int, flag: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{flag} {port} on {host} is already in use; stop the other process or choose another {flag}"
    if error.errno == errno.EACCES:
        return f"{flag} {port} on {host} may not be bound by this user; choose a {flag} of 1024 or more"
    return f"--host {host} {flag} {port} cannot be bound: {error.strerror or error}"
