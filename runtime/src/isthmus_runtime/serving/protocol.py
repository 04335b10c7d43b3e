"""uvicorn's HTTP protocol with what it leaves open: limits on what arrives, and a task that ends with its client.

uvicorn bounds neither a head nor the time a request takes to arrive, and tells of a client that has left only to those
who ask. Here each connection is idle, or in the head or the body of a request; `Server` looks at all of them by and by.
What is refused before it is understood gets an answer too, after the answers to what came before it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Mapping
from enum import Enum
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..errors import InvalidRequest, MemoryShort, Overloaded, RequestError
from . import half_closed
from .access import OF_RUNNING
from .answering import Answering
from .call import WHOLE, error_answer
from .clients import known_by
from .heads import read_head, size_of
from .limits import ACCOUNT, HeadTooLarge, TooSlow
from .memory import LARGE_BODY
from .port import Connection, PortState
from .writing import Flow, Opening, whole_answer

_log = logging.getLogger(__name__)

_MAX_AHEAD = 8
"""Requests that may wait behind the one that is answered. Reading stops at the first; these came with it."""
_LINGER_S = 2.0
"""How long a client that still sends may take to read an answer: closing at once would reset it unread."""
_PIECES, _PIECE = 4096, 64
"""Chunks that a body may come in however small they are, and bytes that further ones have on average: a chunk takes
some two microseconds, in which nobody else is served."""
_EXTENSIONS: dict[str, dict[object, object]] = {WHOLE: {}}
"""Of every scope."""


class _Phase(Enum):
    IDLE = 0
    """No byte of the next request is here."""
    HEAD = 1
    BODY = 2


class Protocol(HttpToolsProtocol):
    """One connection: requests one after another, each in a task of its own."""

    server_state: PortState

    def __init__(
        self,
        config: Config,
        server_state: PortState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = server_state.limits
        self._phase = _Phase.IDLE
        self._since = self.loop.time()
        """When the phase, or the answer to a request that has come whole, began or ended."""
        self._unread, self._read_at = 0, self._since
        """Bytes that were not read of what was written when that was looked at, and when that had changed."""
        self._pending = 0
        """Bytes of which the parser has made neither a head nor a part of a body."""
        self._pieces = 0
        """Chunks of the body that arrives, less one for each of their `_PIECE` bytes."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered; `cycle` is the latest one."""
        self._answering: Answering | None = None
        """The same, until its handler has ended."""
        self._refused: RequestResponseCycle | None = None
        """Whose body was arriving when that was refused."""
        self.refusal: RequestError | None = None
        """See `Asker`."""
        self._deaf = False
        """Nothing more is understood; what comes is dropped."""
        self._arrived = 0
        """Bytes of the latest body, as they came or inflated."""
        self.half_closed = False
        """The client sends no more, and waits for the answers to what it has sent."""

    # ------------------------------------------------------------------------------------------------------- arriving

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio's callback."""
        super().connection_made(transport)
        self.flow: Flow = Flow(transport)
        leaver = self.server_state.table.add(self, self._address)
        if leaver is not None:
            leaver.give_way(Overloaded("too many connections; try again", retry_after_s=1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's callback."""
        super().connection_lost(exc)
        self.server_state.table.remove(self)
        self.server_state.bodies.release(self)
        self._forsake()

    def eof_received(self) -> bool:  # type: ignore[override]
        """asyncio's callback: the client sends no more. It has left, or has closed its side alone and still reads; what
        becomes of the next bytes to it tells the two apart. True: the connection stays open for answers."""
        running = self._running
        if running is None or self._reads_body() or running.scope["http_version"] == "1.0":
            # Nothing is owed, or never can be; and HTTP/1.0 has no bytes that say nothing.
            return False
        if not self.half_closed:
            self.half_closed = self.flow.held = True
            if not self.pipeline:
                running.keep_alive = False
            half_closed.watch(self.transport, running, self.loop)
        return True

    def data_received(self, data: bytes) -> None:
        """asyncio's callback."""
        while data and not self._deaf:
            self._pending += len(data)
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as e:
                data = data[e.args[0] :]  # nothing is upgraded to: RFC 9110, 7.8 lets it be ignored
            except httptools.HttpParserError as e:
                cause = e.__context__ if isinstance(e, httptools.HttpParserCallbackError) else None
                # A copy has no traceback, which would hold `data` for as long as this connection is remembered.
                known = copy.copy(cause) if isinstance(cause, RequestError) else None
                self._refuse(known or InvalidRequest(f"this is not HTTP/1.1: {e}"))
                return
            if self._pending > self._limits.max_head_bytes:
                self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        """The parser's callback: the first byte of a request."""
        if len(self.pipeline) >= _MAX_AHEAD:
            raise InvalidRequest(f"more than {_MAX_AHEAD} requests were sent before the first was answered")
        self._phase = _Phase.HEAD
        self._arrived = 0
        self._since = self.loop.time()
        if self._running is None:
            self.server_state.table.waits(self)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser's callback: a line of a head, or a trailer."""
        if len(self.headers) >= self._limits.max_headers:
            raise self._too_large()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The parser's callback."""
        limit = self._limits.max_head_bytes
        ahead = self._running is not None
        if (self._pending > limit or ahead) and sum(len(n) + len(v) for n, v in self.headers) + len(self.url) > limit:
            raise self._too_large()
        upgrades = self.parser.should_upgrade()
        head = read_head(self.headers, version=self.parser.get_http_version(), upgrades=upgrades)
        extensions = _EXTENSIONS
        if head.encoded:
            extensions = {**extensions, ACCOUNT: {"add": self._account, "whole": self._inflated}}
        if head.has_body and self.server_state.memory.tight:
            self._bound_new()
        self._pending = self._pieces = 0
        self.scope["extensions"] = {**extensions}
        super().on_headers_complete()  # raises for a target that it cannot read
        self._phase = _Phase.BODY
        self.flow.held = bool(self.pipeline)
        self.headers = []  # trailers end here: nobody reads them
        if ahead:
            self._make_room(self.server_state.bodies.add(self, _size_of_head(self.cycle), self._address))
        if self.server_state.leaving:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """The parser's callback."""
        self._pending = 0
        self._pieces += 1 - len(body) // _PIECE
        if self._pieces > _PIECES:
            raise InvalidRequest(
                f"the body comes in too many pieces: {_PIECES} and one more for each {_PIECE} bytes are taken; send "
                "larger chunks"
            )
        super().on_body(body)
        self._arrived += len(body)
        self._make_room(self.server_state.bodies.add(self, len(body), self._address))
        if self.server_state.memory.came(len(body)):
            self._bound_large()

    def on_message_complete(self) -> None:
        """The parser's callback: the last byte of a request."""
        self._pending = 0
        self._phase = _Phase.IDLE
        if self._running is not None:
            self.server_state.table.works(self)
        self.server_state.bodies.arrived(self)
        super().on_message_complete()

    # ------------------------------------------------------------------------------------------------------ answering

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self.refusal is not None and (cycle.more_body or cycle is self._refused):
            self._say_no(self.refusal)
            return
        self._running = cycle
        answering = self._answering = Answering(self, cycle)
        task = answering.task = self.loop.create_task(answering.run(app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """See `Asker`."""
        return self.server_state.default_headers

    def planned(self) -> None:
        """See `Asker`. Those behind it have their bodies."""
        bodies = self.server_state.bodies
        behind = sum(len(cycle.body) + _size_of_head(cycle) for cycle, _ in self.pipeline) if self.pipeline else 0
        if behind:
            bodies.release_part(self, bodies.of(self) - behind)
        else:
            bodies.release(self)

    def wrote(self, size: int) -> None:
        """See `Asker`."""
        if unread := self.unread:
            self.server_state.wrote(min(size, unread))

    def answered(self, one: Answering) -> None:
        """See `Asker`."""
        if self._answering is one:  # the next in line may have begun
            self._answering = None

    def close_early(self) -> None:
        """See `Asker`."""
        if self._has_no_room():
            self.transport.close()
        else:
            self._linger()

    def on_response_complete(self) -> None:
        """Of the cycle: the next request in line may start. Keeping alive is `check`'s, without a timer each."""
        running, self._running = self._running, None
        if running is not None and isinstance(running.transport, Opening):
            running.transport.flush()  # an answer to HEAD has no piece that would take its head along
        self._since = self.loop.time()
        if self.transport.is_closing():
            return
        following = self.pipeline.pop() if self.pipeline else None
        if self.half_closed and following is not None:
            following[0].keep_alive = bool(self.pipeline)
            if following[0].more_body:
                following = None  # the rest of it never arrives
        if self.half_closed and following is None and self.refusal is None:
            self.transport.close()
            return
        if following is None or following[0].more_body:
            self.server_state.table.waits(self)
        self.flow.held = self.half_closed or bool(self.pipeline)
        self.flow.resume_reading()
        if following is not None:
            self._start_asgi_task(*following)
        elif self.refusal is not None and not (self._phase is _Phase.BODY and running is self.cycle):
            self._say_no(self.refusal)

    # --------------------------------------------------------------------------------------------------------- server

    def check(self, now: float) -> None:
        """End the connection if it has been idle, or a request arriving, or what is written unread, for too long at
        `now` (the loop's clock)."""
        if self.unread != self._unread:
            self._unread, self._read_at = self.unread, now
        running = self._running
        # A request whose answer has not begun may wait for this: what is unread is of those before it.
        over = running is None or not running.response_started or self.transport.is_closing()
        if self._unread and over and now - self._read_at > self._limits.stuck_s:
            self.transport.abort()  # to close would wait for it to be read
            return
        if self._deaf or self.transport.is_closing():
            return
        waited = now - self._since
        if self._phase is _Phase.IDLE:
            if self._running is None and waited > self._limits.keep_alive_s:
                self.transport.close()
        elif waited > self._limits.arrival_s and (self._running is None or self._reads_body()):
            # A head behind a request that is still answered has time until that is over.
            self._refuse(TooSlow(f"the request did not arrive within {self._limits.arrival_s:g} s"))

    @property
    def _task(self) -> asyncio.Task[None] | None:
        """That answers."""
        return None if self._answering is None else self._answering.task

    @property
    def _address(self) -> str:
        return known_by(self.client[0]) if self.client else ""

    @property
    def unread(self) -> int:
        """Bytes of answers that wait here for the client to read."""
        return self.transport.get_write_buffer_size()

    def give_way(self, error: Overloaded) -> None:
        """Make room for others: an idle connection ends without a word, what arrives is refused with `error`."""
        if self._deaf or self.transport.is_closing():
            return
        if self._phase is _Phase.IDLE and self._running is not None:
            self.refusal, self._deaf = error, True  # its body is here, and is being inflated: see `_account`
            self._running.keep_alive = False
        elif self._phase is _Phase.IDLE and self.cycle is not None:
            self.transport.close()  # between two requests, as any server may
        else:
            self._refuse(error)

    @property
    def may_end(self) -> bool:
        """Whether there is a request here that can end, or an answer that nobody reads."""
        if self._deaf or self.transport.is_closing():
            return False
        if self._reads_body() or self.server_state.in_flight.works_on(self._task):
            return True
        return self._running is None and self.unread > 0

    @property
    def who(self) -> str:
        """See `Connection`."""
        return ("" if self._answering is None else self._answering.who) or self._address

    def held(self, beside: Mapping[object, int]) -> int:
        """See `Connection`."""
        task, of_it = (None, 0) if (one := self._answering) is None else (one.task, one.beside)
        return self.server_state.bodies.of(self) + self.unread + of_it + beside.get(task, 0)

    def end(self, error: Overloaded) -> None:
        """End what `may_end`, so that its memory comes back: with `error`, where it can still be told."""
        if self._reads_body():
            self.server_state.bodies.release(self)
            self.give_way(error)
        elif self.server_state.in_flight.works_on(self._task):
            assert self._task is not None
            self.server_state.in_flight.end(self._task, error)
        else:
            self.transport.abort()

    def leave(self) -> None:
        """The answer to the latest request is the last."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    # ------------------------------------------------------------------------------------------------------ internals

    def _reads_body(self) -> bool:
        """Whether the request that is being answered is the one that arrives."""
        return self._phase is _Phase.BODY and self._running is self.cycle

    def _account(self, size: int) -> None:
        """Count `size` bytes that were made of the body. Raises Overloaded when it is this one that has to go."""
        self._make_room(self.server_state.bodies.add(self, size, self._address))
        self._arrived += size
        if self.server_state.memory.came(size):
            self._bound_large()
        if self.refusal is not None:
            raise copy.copy(self.refusal)

    def _bound_new(self) -> None:
        """Before a body is read: raises MemoryShort where it is large, or where nothing is taken."""
        memory = self.server_state.memory
        if memory.critical and not self.url.startswith(OF_RUNNING):
            raise memory.new()
        if any(name == b"content-length" and int(value) > LARGE_BODY for name, value in self.headers):
            raise memory.large()

    def _bound_large(self) -> None:
        """Where memory is tight nothing large comes in; where it is critical nothing more of what has been let in. What
        is here of it goes at once, and not when its task has its turn: others come before."""
        memory = self.server_state.memory
        if self._deaf or self.transport.is_closing():
            return
        if self._arrived > LARGE_BODY:
            error = memory.large()
        elif memory.critical and self.server_state.in_flight.works_on(self._task):
            error = memory.new()
        else:
            return
        if self._running is self.cycle:
            self.server_state.bodies.release(self)
        else:
            self.server_state.bodies.release_part(self, len(self.cycle.body))
        self.cycle.body = bytearray()
        self.give_way(error)

    def _inflated(self) -> None:
        """All of the body is made: from now on it gives way to nobody, and what comes after it may have to."""
        self.server_state.bodies.arrived(self)

    def _make_room(self, largest: Connection | None) -> None:
        while largest is not None:
            most = self.server_state.bodies.most
            text = f"bodies of requests take more than {most} bytes (--max-body-memory); try again, or send less"
            largest.give_way(Overloaded(text, retry_after_s=1.0))
            largest = self.server_state.bodies.excess()

    def _too_large(self) -> HeadTooLarge:
        most = self._limits
        return HeadTooLarge(
            f"the head of the request has more than {most.max_head_bytes} bytes, or more than {most.max_headers} lines"
        )

    def _refuse(self, error: RequestError) -> None:
        """Answer for what arrives, once that is due, and close."""
        self.refusal = error
        self._deaf = True
        if self._phase is _Phase.BODY:
            self._refused = self.cycle
        if self.headers:
            self.headers.clear()  # of a head of which nobody hears; they would stay as long as the connection lingers
        if isinstance(error, InvalidRequest):
            _log.info("a client sent a bad request: %s", error.message)
        if self._running is None or self._reads_body():
            self._say_no(error)

    def _say_no(self, error: RequestError) -> None:
        if self._phase is _Phase.BODY and self.cycle.response_started:
            self.transport.abort()  # it was answered before it was here
            return
        if self._running is not None and not self._running.response_complete:
            # Its handler waits for the rest: it is told by `receive`, and gives the answer.
            if self._answering is not None:
                self._answering.turned_away = True
            self._running.keep_alive = False
            self._running.message_event.set()
            self.loop.call_later(_LINGER_S, self._cut_short, self._running)
            return
        status, headers, body = error_answer(error)
        lines = [*self.server_state.default_headers, *((k.encode(), v.encode()) for k, v in headers.items())]
        lines.append((b"content-length", b"%d" % len(body)))
        self.transport.write(whole_answer(status, lines, body, close=True))
        self._forsake()
        self.close_early()

    def _has_no_room(self) -> bool:
        """Whether this connection has to make room at once, and cannot wait for its client to read what it is told."""
        if isinstance(self.refusal, MemoryShort):
            return self.server_state.memory.critical
        return isinstance(self.refusal, Overloaded)

    def _cut_short(self, cycle: RequestResponseCycle) -> None:
        """A handler that was told should have answered by now."""
        if not cycle.response_started:
            self._forsake()
            self.transport.abort()

    def _linger(self) -> None:
        """Close once the client has, or had time to."""
        self._deaf = True
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def _forsake(self) -> None:
        """Nobody is there for the answer any more."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            if (task := self._task) is not None:
                task.cancel()
        self._running = None


def _size_of_head(cycle: RequestResponseCycle) -> int:
    scope = cycle.scope
    return size_of(scope["headers"], len(scope["raw_path"]) + len(scope["query_string"]))
