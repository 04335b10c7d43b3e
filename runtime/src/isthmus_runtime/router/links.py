"""HTTP calls from the router to engines, with their failures as errors of our tree."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from typing import Any

import aiohttp

from ..errors import EngineFailed, RequestError, error_from_json
from ..protocol import AbortCall, CommitCall

_log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 1.0
_CONTROL_TIMEOUT_S = 2.0
"""For commit and abort: an engine answers them without computing anything."""
_JSON = {"Content-Type": "application/json"}

LOST = (aiohttp.ClientError, OSError, TimeoutError)
"""What a call raises when the peer is gone or was never there."""


def new_session() -> aiohttp.ClientSession:
    """The one session of a router: no limit on connections (requests are limited), no cookies, no overall timeout."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        auto_decompress=False,
    )


def lost(role: str, url: str, attempt: str, cause: object) -> EngineFailed:
    """The error for a peer whose connection broke."""
    what = str(cause) or type(cause).__name__
    return EngineFailed(f"{role} engine {url} was lost: {what}", stage=role, attempt=attempt or None)


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

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, url: str, path: str, body: str) -> aiohttp.ClientResponse:
        """POST and return at the answer's headers. Raises one of LOST."""
        return await self._session.post(url + path, data=body.encode(), headers=_JSON)

    async def commit(self, url: str, call: CommitCall) -> None:
        """Tell decode about its prefill leg. Raises one of LOST, or RequestError when decode does not accept it."""
        timeout = aiohttp.ClientTimeout(total=_CONTROL_TIMEOUT_S)
        body = call.model_dump_json().encode()
        async with self._session.post(url + "/internal/commit", data=body, headers=_JSON, timeout=timeout) as answer:
            raw = await answer.read()
            if answer.status != 200:
                raise refusal(answer.status, raw, "decode", url)

    def abort(self, url: str, request_id: str, attempt: str) -> None:
        """End the request at the engine. Closing its connection does too, where there is one and the peer notices."""
        self._spawn(self._abort(url, AbortCall(request_id=request_id, attempt=attempt)))

    def discard(self, response: aiohttp.ClientResponse) -> None:
        """Read what is left of an answer that is complete for us, so that its connection can be used again."""
        if not response.content.at_eof():
            self._spawn(self._discard(response))

    async def close(self) -> None:
        """Wait for what runs in the background; all of it has a deadline."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _abort(self, url: str, call: AbortCall) -> None:
        timeout = aiohttp.ClientTimeout(total=_CONTROL_TIMEOUT_S)
        body = call.model_dump_json().encode()
        try:
            async with self._session.post(url + "/internal/abort", data=body, headers=_JSON, timeout=timeout) as answer:
                await answer.read()
        except LOST as e:
            _log.warning("abort of %s did not reach %s: %s", call.request_id, url, str(e) or type(e).__name__)

    async def _discard(self, response: aiohttp.ClientResponse) -> None:
        try:
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                await response.read()
        except LOST as e:
            _log.debug("an answer did not end: %s", str(e) or type(e).__name__)
            response.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
