"""The decode leg of an attempt: the stream of one engine, read by one task and ended by whoever has a reason to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import EngineFailed, EngineLost, is_panic
from ..interfaces.backend import Said, Take
from ..metrics import RouterMetrics
from ..protocol.lines import parse_line
from ..protocol.ticket import Ticket
from ..request import TokenChunk
from .links import LOST, Links, lost, refusal
from .pool import EnginePool
from .token_lines import TokenLines
from .wire import Exchange

LONG_WORDS = 1 << 16
"""Bytes of an engine's words above which they are read in a thread: a prompt's scores may be megabytes."""


class DecodeLeg:
    """Use: `open` once, then `line`, or `pass_plain` and `arrivals`; `close` always.

    Where the client has the first token from prefill (`expect`), decode says it again with the KV that it got, or
    computed, and that is left out of the stream.
    """

    def __init__(
        self,
        url: str,
        request_id: str,
        attempt: str,
        *,
        tokens: int,
        pool: EnginePool,
        links: Links,
        metrics: RouterMetrics | None,
    ) -> None:
        """`tokens`: what it counts for in the engine's load, from now on."""
        self._request_id = request_id
        self.url = url
        self._attempt = attempt
        self._pool = pool
        self._links = links
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._failure: Exception | None = None
        self._timer: asyncio.Timeout | None = None
        self._response: Exchange | None = None
        self._lines = TokenLines()
        self._passing: asyncio.Future[Said | None] | None = None
        self._told: int | None = None
        """The first token, if the client has it already."""
        self._owed = False
        """The engine has yet to say it again."""
        self.unsent = True
        """No engine has seen a byte of the request."""
        self.ended = False
        """The engine has said its last word."""
        self._gone = False
        self._hold = pool.hold(url, tokens, self._lost)

    async def open(self, body: Sequence[bytes], headers: bytes) -> None:
        """Send the call; returns when it is accepted. Raises RequestError, or what `interrupt` was given."""
        url = self.url
        try:
            response = self._links.idle(url) or await self._connect(url)
            if self._failure is not None:
                response.close()
                raise self._failure
            self._response = response  # from here on `interrupt` ends every wait by closing it
            self.unsent = False
            self._links.ask(response, url, "/internal/generate", body, headers)
            del body  # maybe megabytes, which would wait for the first token, in each choice of a request
            await response.answered()
            if response.status == 200:
                return
            raw = await response.read()
        except LOST as e:
            raise self._failure or self.lose(e) from e
        self.ended = True
        raise refusal(response.status, raw, "decode", url)

    async def line(self) -> Ticket | TokenChunk:
        """What the engine says next. Raises as `open`."""
        while True:
            line = await self._whole_line()
            if isinstance(line, Ticket) or not self._owed:
                return line
            line = self._without_told(line)
            if line.token_ids or line.finish_reason is not None:
                return line

    @property
    def has_news(self) -> bool:
        """Whether `line` has not to wait."""
        assert self._response is not None
        return bool(self._lines) or self._response.over

    def follow(self, arrived: Callable[[], None] | None) -> None:
        """Call `arrived` whenever there is news, until None is given."""
        assert self._response is not None
        self._response.follow(arrived)

    def expect(self, told: int) -> None:
        """The client has the first token."""
        self._told, self._owed = told, True

    def pass_plain(self, take: Take) -> Said | None:
        """What `take` says of the plain lines that are here; None: there is none."""
        assert self._response is not None
        if self._owed:
            # The engine's word for the token that was told: `line` looks at it, and its failure is located and counted.
            self._lines.add(self._response.here())
            return None
        chunk = self._lines.plain_of(self._response.here())
        if chunk is None:
            return None
        self._hold.heard()
        self.ended = chunk.finish_reason is not None
        return take(chunk)

    async def arrivals(self, take: Take) -> Said | None:
        """Give plain lines to `take` as they arrive, until it says anything but to go on, or until they end. None:
        what comes next is not one of them."""
        response = self._response
        assert response is not None
        if self._lines or response.over:
            return None
        done = self._passing = self._loop.create_future()
        response.follow(partial(self._arrived, done, take))
        del done  # an error of it holds this frame, and would be held by it
        try:
            return await self._passing
        finally:
            response.follow(None)
            self._passing = None

    def interrupt(self, failure: Exception) -> None:
        """Make the reader raise `failure`, now or at its next wait."""
        if self._failure is not None or self.ended:
            return
        self._failure = failure
        if self._timer is not None:
            if not self._timer.expired():
                self._timer.reschedule(self._loop.time())
        elif self._response is not None:
            # Wakes the reader with an error. A timeout around each read would do the same, at a cost for each token.
            self._response.close()

    def lose(self, cause: object) -> EngineLost:
        """The engine is gone, and the pool knows; the error for that."""
        self._gone = True
        error = lost("decode", self.url, self._attempt, cause)
        self._pool.failed(self.url, error.message)
        return error

    def close(self) -> None:
        """End what still runs, at once and without waiting."""
        self._hold.release()
        self._failure = None  # its traceback has frames that have this
        if self.ended:
            assert self._response is not None
            self._response.release()
            return
        if self._response is not None:
            self._response.close()
        if not self._gone:
            self._links.abort(self.url, self._request_id, self._attempt)

    # --------------------------------------------------------------------------------------------------- internals

    async def _connect(self, url: str) -> Exchange:
        """A new connection, unless `interrupt` ends the wait first."""
        timer = self._timer = asyncio.timeout(None if self._failure is None else 0)
        try:
            async with timer:
                return await self._links.connect(url)
        finally:
            self._timer = None

    async def _whole_line(self) -> Ticket | TokenChunk:
        while not self._lines:
            assert self._response is not None
            try:
                data = await self._response.readany()
            except LOST as e:
                raise self._failure or self.lose(e) from e
            self._hold.heard()
            if not data:
                raise self._failure or self.lose("it closed the stream without an end")
            self._lines.add(data)
        plain = self._lines.plain()
        if plain is not None:
            self.ended = plain.finish_reason is not None
            return plain
        raw = self._lines.pop()
        try:
            line = parse_line(raw) if len(raw) <= LONG_WORDS else await asyncio.to_thread(parse_line, raw)
        except (ValueError, KeyError, TypeError) as e:
            raise EngineFailed(f"decode engine {self.url} sent a line that is not a valid chunk: {e}") from e
        if isinstance(line, Ticket):
            return line
        if line.finish_reason is None and not line.logprobs and not line.vector:
            line = self._lines.plain(line) or line
        self.ended = line.finish_reason is not None
        return line

    def _without_told(self, chunk: TokenChunk) -> TokenChunk:
        if not chunk.token_ids:
            return chunk
        self._owed = False
        if chunk.token_ids[0] != self._told:
            raise EngineFailed(
                f"decode engine {self.url} has {chunk.token_ids[0]} for the first token, and the client {self._told} "
                "from prefill",
                stage="decode",
            )
        if self._metrics is not None and chunk.note:
            self._metrics.prompt(chunk.note)
        return chunk._replace(token_ids=chunk.token_ids[1:], logprobs=chunk.logprobs[1:])

    def _arrived(self, done: asyncio.Future[Said | None], take: Take) -> None:
        self._hold.heard()
        if done.done():
            return
        try:
            said = self.pass_plain(take)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            done.set_exception(error)
            del done  # the error holds this frame
            return
        assert self._response is not None
        if self.ended or self._lines or self._response.over or said not in (None, True):
            done.set_result(said)

    def _lost(self, reason: str) -> None:
        self.interrupt(self.lose(reason))
