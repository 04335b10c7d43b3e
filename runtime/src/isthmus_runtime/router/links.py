"""HTTP calls from the router to engines, with their failures as errors of our tree."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import aiohttp

from ..credentials import Credentials
from ..errors import EngineLost, RequestError, error_from_json
from ..protocol.calls import AbortCall, AdapterCall, CommitCall, TicketCall
from .patience import Patience
from .wire import CONNECT_TIMEOUT_S, Exchange, Wire

_log = logging.getLogger(__name__)

_CONTROL_TIMEOUT_S = 2.0
"""For commit and abort: an engine answers them without computing anything."""

_ADAPTER_TIMEOUT_S = 60.0
"""An engine reads the files of an adapter, some hundred megabytes at most."""

_Call = TicketCall | CommitCall | AbortCall | AdapterCall

LOST = (OSError, TimeoutError)
"""What a call raises when the peer is gone or was never there."""


def new_session() -> aiohttp.ClientSession:
    """A session for probes of engines: no limit on connections, no cookies, no overall timeout."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
    )


def lost(role: str, url: str, attempt: str, cause: object) -> EngineLost:
    """The error for a peer whose connection broke, or that stopped answering."""
    what = str(cause) or type(cause).__name__
    return EngineLost(f"{role} engine {url} was lost: {what}", stage=role, attempt=attempt or None)


def refusal(status: int, body: bytes, role: str, url: str) -> RequestError:
    """The error in an engine's answer, as it was raised there."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        error = None
    if not isinstance(error, dict):
        error = {"message": f"{role} engine {url} answered HTTP {status}: {body[:200].decode(errors='replace')}"}
    return error_from_json(status, error)


class Links:
    """Calls to engines. Aborts go in the background: whoever gives up a request must not wait for a sick peer."""

    def __init__(self, credentials: Credentials | None = None) -> None:
        """`credentials`: shown to engines with each call."""
        self._wire = Wire(None if credentials is None else credentials.authorization)
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, url: str, path: str, body: Sequence[bytes], more: bytes = b"") -> Coroutine[Any, Any, Exchange]:
        """POST and return at the answer's head. `more`: header lines. Raises one of LOST. The body is dropped as soon
        as it is sent."""
        return self._wire.post(url, path, body, more)

    def idle(self, url: str) -> Exchange | None:
        """A connection that is there already."""
        return self._wire.idle(url)

    async def connect(self, url: str) -> Exchange:
        """A new connection. Raises one of LOST."""
        return await self._wire.connect(url)

    def ask(self, exchange: Exchange, url: str, path: str, body: Sequence[bytes], more: bytes = b"") -> None:
        """POST on a connection of the caller, who waits until it has `answered` and closes it."""
        self._wire.ask(exchange, url, path, body, more)

    async def commit(self, url: str, call: CommitCall) -> None:
        """Tell decode about its prefill leg. Raises one of LOST, or RequestError when decode does not accept it."""
        status, raw = await self._control(url, "/internal/commit", call)
        if status != 200:
            raise refusal(status, raw, "decode", url)

    def ticket(self, url: str, call: TicketCall) -> None:
        """Give prefill, in the background, what it waits for. It says in its own answer when that did not come."""
        self._behind(self._told(url, "/internal/ticket", call, f"the ticket of attempt {call.ticket.attempt}"))

    async def adapter(self, url: str, call: AdapterCall) -> None:
        """Have the engine load or unload an adapter. Raises one of LOST, or the RequestError that it answers."""
        status, raw = await self._control(url, "/internal/adapter", call, _ADAPTER_TIMEOUT_S)
        if status != 200:
            raise refusal(status, raw, "", url)

    def abort(self, url: str, request_id: str, attempt: str) -> None:
        """End the request at the engine. Closing its connection does too, where there is one and the peer notices."""
        call = AbortCall(request_id=request_id, attempt=attempt)
        self._behind(self._told(url, "/internal/abort", call, f"abort of {request_id}"))

    def forget(self, url: str) -> None:
        """The engine has left the fleet: its idle connections are closed."""
        self._wire.forget(url)

    async def close(self) -> None:
        """Wait for what runs in the background; all of it has a deadline."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._wire.close()

    def _behind(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _told(self, url: str, path: str, call: _Call, what: str) -> None:
        try:
            status, raw = await self._control(url, path, call)
        except LOST as e:
            _log.warning("%s did not reach %s: %s", what, url, str(e) or type(e).__name__)
            return
        if status != 200:
            _log.warning("%s was refused by %s: %s", what, url, refusal(status, raw, "", url))

    async def _control(
        self,
        url: str,
        path: str,
        call: _Call,
        timeout_s: float = _CONTROL_TIMEOUT_S,
    ) -> tuple[int, bytes]:
        """Status and body of a call that an engine answers within `timeout_s`."""
        async with Patience(timeout_s):
            exchange = await self._wire.post(url, path, (call.model_dump_json(exclude_none=True).encode(),))
            try:
                return exchange.status, await exchange.read()
            finally:
                exchange.release()
