"""Shared HTTP server parts of every role: error bodies, in-flight tracking, and a run with a graceful end."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from .calls import Serve, error_answer, payload_fault
from .errors import ConfigError, EngineFailed, Overloaded, RequestError
from .frontdoor import FrontDoor

_log = logging.getLogger(__name__)
_ABORT_GRACE_S = 2.0
"""After aborting what is left, how long its last bytes may take to leave."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_response(error: RequestError) -> web.Response:
    """`error` as an OpenAI error body with its status, and Retry-After where it has one."""
    status, headers, body = error_answer(error)
    return web.Response(status=status, headers=headers, body=body)


def plain_error(
    status: int, message: str, *, code: str | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    """An OpenAI error body for what has no class in the error tree (401, 404, 405, 413)."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def json_response(body: object) -> web.Response:
    """A 200 with a JSON body."""
    return web.Response(body=json.dumps(body).encode(), content_type="application/json")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception that a handler lets out into an error body: ours, aiohttp's own, and the unforeseen.

    Where a response had begun already, the connection is aborted instead: a broken stream must not look complete.
    """
    try:
        return await handler(request)
    except RequestError as error:
        response = error_response(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        response = plain_error(error.status, f"{request.method} {request.path}: {error.reason}", headers=allow)
    except RequestPayloadError as error:
        response = plain_error(400, f"the body cannot be read: {payload_fault(error)}")
    except ConnectionResetError:
        raise  # the client has gone; aiohttp ends the request
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        response = error_response(EngineFailed("internal error; the log of this process has the details"))
    if _begun(request) and request.transport is not None:
        _log.warning("%s %s failed after its response had begun: %s", request.method, request.path, response.status)
        request.transport.abort()
    return response


def _begun(request: web.Request) -> bool:
    # Chunked framing is switched on when a stream is prepared, before its headers leave the buffer.
    return request.writer.output_size > 0 or bool(getattr(request.writer, "chunked", False))


class InFlight:
    """The requests a process works on, for a drain: counts them, refuses new ones, and ends the rest.

    Handlers wrap their work in `track()`. After `abort()` they get CancelledError with `aborting` True, which means
    "answer with `refusal()`", while False means that the client has gone.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.leaving = False
        self.draining = False
        self.aborting = False

    def __len__(self) -> int:
        return len(self._tasks)

    def track(self) -> _Tracked:
        """A `with` block that counts as a request of the current task; raises the refusal when draining."""
        return _Tracked(self)

    def enter(self) -> asyncio.Task[object]:
        """The current task has begun a request. For `track`."""
        if self.draining:
            raise self.refusal()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._idle.clear()
        return task

    def leave(self, task: asyncio.Task[object]) -> None:
        """The request of `task` has ended. For `track`."""
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()

    def refusal(self) -> Overloaded:
        """What a request gets that this process will not take or finish."""
        return Overloaded("this process is shutting down; try again", retry_after_s=1.0)

    def start_leaving(self) -> None:
        """Say so (readiness, `Connection: close`), and still take what comes."""
        self.leaving = True

    def start_drain(self) -> None:
        """Take no new request from now on."""
        self.leaving = self.draining = True

    async def wait_idle(self) -> None:
        """Returns when no request is left."""
        await self._idle.wait()

    def abort(self) -> None:
        """Cancel every tracked task."""
        self.aborting = True
        for task in self._tasks:
            task.cancel()


class _Tracked:
    """Not a generator: it is on the path of each request."""

    __slots__ = ("_in_flight", "_task")

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight

    def __enter__(self) -> None:
        self._task = self._in_flight.enter()

    def __exit__(self, *exc: object) -> None:
        self._in_flight.leave(self._task)


class _DebugAccessLogger(AbstractAccessLogger):
    @property
    def enabled(self) -> bool:
        return self.logger.isEnabledFor(logging.DEBUG)

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        self.logger.debug("%s %s %s %.1f ms", request.method, request.path, response.status, time * 1e3)


class _ClientFaults(logging.Filter):
    """What is no HTTP, or a body that cannot be decoded, is the client's fault: one line, not our traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ConnectionResetError):
            return False  # the client has gone, which is no event
        if not isinstance(error, HttpProcessingError | RequestPayloadError):
            return True
        record.msg, record.args = "a client sent bad HTTP: %s", (" ".join(str(error).split())[:200],)
        record.exc_info, record.exc_text = None, None
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return _log.isEnabledFor(logging.INFO)


def _protocol_log() -> logging.Logger:
    log = logging.getLogger("isthmus_runtime.http")
    if not log.filters:
        log.addFilter(_ClientFaults())
    return log


class Site(web.BaseSite):
    """A listening port, with a front door where there are hot paths."""

    __slots__ = ("_door", "_host", "_hot", "_port")

    def __init__(self, runner: web.AppRunner, host: str, port: int, hot: Mapping[str, Serve]) -> None:
        super().__init__(runner, backlog=1024)
        self._host = host
        self._port = port
        self._hot = hot
        self._door: FrontDoor | None = None

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        await super().start()
        make = self._runner.server
        assert make is not None
        if self._hot:
            self._door = FrontDoor(self._hot, make)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            make if self._door is None else self._door, self._host, self._port, backlog=self._backlog
        )

    def leave(self) -> None:
        """The next answer on each connection is its last."""
        if self._door is not None:
            self._door.leaving = True

    async def stop(self) -> None:
        await super().stop()
        if self._door is not None:
            await self._door.close(_ABORT_GRACE_S)


async def run_app(
    app: web.Application,
    *,
    host: str,
    port: int,
    drain_timeout_s: float,
    lame_duck_s: float = 0.0,
    in_flight: InFlight | None = None,
    stop: asyncio.Event | None = None,
    on_started: Callable[[int], None] | None = None,
    on_drain: Callable[[], None] | None = None,
    drained: Callable[[], Awaitable[None]] | None = None,
    before_close: Callable[[], Awaitable[None]] | None = None,
    hot: Mapping[str, Serve] | None = None,
) -> None:
    """Serve `app` until SIGTERM, SIGINT or `stop`, then drain.

    The listener stays open while draining, so that probes and peers (drain acknowledgements, aborts) are answered;
    new work is refused by `in_flight`. After `in_flight` is idle and `drained()` has returned, or after
    `drain_timeout_s`, or at a second signal, what is left is aborted and the listener closed.

    After SIGTERM, but not after a person's SIGINT, requests are still taken for `lame_duck_s` before the drain, each
    answered with `Connection: close`: who balances over several such processes hears of the end later than this one.

    `before_close` runs last, while the listener still answers: what a refused connection would tell peers must be
    true by then. `on_started` gets the bound port (useful with port 0). Plain POSTs to the paths of `hot` do not pass
    through `app` (frontdoor.py).

    Raises:
        ConfigError: the port cannot be bound.
    """
    stop = asyncio.Event() if stop is None else stop
    in_flight = InFlight() if in_flight is None else in_flight
    again = asyncio.Event()
    lame_duck = 0.0

    def on_signal(number: signal.Signals) -> None:
        nonlocal lame_duck
        if not stop.is_set() and number is signal.SIGTERM:
            lame_duck = lame_duck_s
        (again if stop.is_set() else stop).set()

    async def say_so(request: web.Request, response: web.StreamResponse) -> None:
        if in_flight.leaving:
            response.force_close()

    app.on_response_prepare.append(say_so)

    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=_ABORT_GRACE_S,
        access_log=logging.getLogger("isthmus_runtime.access"),
        access_log_class=_DebugAccessLogger,
        logger=_protocol_log(),
    )
    await runner.setup()
    site = Site(runner, host, port, hot or {})
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    try:
        try:
            await site.start()
        except OSError as e:
            raise ConfigError(_bind_problem(host, port, e)) from e
        for number in signals:
            loop.add_signal_handler(number, on_signal, number)
        if on_started is not None:
            on_started(runner.addresses[0][1])
        await stop.wait()
        in_flight.start_leaving()
        site.leave()
        if lame_duck:
            _log.info("leaving: takes requests for %g s more", lame_duck)
            with suppress(TimeoutError):
                await asyncio.wait_for(again.wait(), lame_duck)
        in_flight.start_drain()
        if on_drain is not None:
            on_drain()
        _log.info("draining: %d requests, at most %g s", len(in_flight), drain_timeout_s)
        await _drain(in_flight, drained, again, drain_timeout_s)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        in_flight.start_drain()
        if len(in_flight):
            _log.warning("aborting %d requests that did not end in time", len(in_flight))
            in_flight.abort()
        try:
            if before_close is not None:
                await before_close()
        finally:
            await runner.cleanup()


async def _drain(
    in_flight: InFlight, drained: Callable[[], Awaitable[None]] | None, again: asyncio.Event, timeout_s: float
) -> None:
    async def quiet() -> None:
        await in_flight.wait_idle()
        if drained is not None:
            await drained()

    ends = [asyncio.ensure_future(quiet()), asyncio.ensure_future(again.wait())]
    try:
        done, _ = await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


def check_port(host: str, port: int) -> None:
    """Fail before the slow part of a start when the port is taken. ConfigError as from `run_app`."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as e:
        raise ConfigError(_bind_problem(host, port, e)) from e


def _bind_problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port {port} on {host} is already in use; stop the other process or choose another --port"
    if error.errno == errno.EACCES:
        return f"--port {port} on {host} may not be bound by this user; choose a --port of 1024 or more"
    return f"--host {host} --port {port} cannot be bound: {error.strerror or error}"
