"""uvicorn's HTTP protocol with what it leaves open: limits on what arrives, and a task that ends with its client.

uvicorn bounds neither a head nor the time a request takes to arrive, and tells of a client that has left only to those
who ask. Here each connection is idle, or in the head or the body of a request; `Server` looks at all of them by and by.
What is refused before it is understood gets an answer too, after the answers to what came before it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import socket
from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..errors import InvalidRequest, MemoryShort, Overloaded, RequestError
from .access import OF_RUNNING
from .call import DROPPED, PIECE, WHOLE, Cut, error_answer
from .limits import ACCOUNT, HeadTooLarge, TooSlow
from .memory import LARGE_BODY
from .port import Connection, PortState
from .pressure import Held
from .writing import Flow, Opening, whole_answer

_log = logging.getLogger(__name__)

_MAX_AHEAD = 8
"""Requests that may wait behind the one that is answered. Reading stops at the first; these came with it."""
_LINE = 200
"""Bytes that a line of a head takes, beside its own."""
_LINGER_S = 2.0
"""How long a client that still sends may take to read an answer: closing at once would reset it unread."""
_FIRST_LOOK_S, _LATER_LOOKS_S = 0.005, 1.0
"""When to look whether a client that sends no more has left: once the answer of a host nearby is here, then later and
later, but at least this often."""
_BEFORE_HEAD, _BEFORE_CHUNK = b"HTTP/1.1 100 Continue\r\n\r\n", b"0"
"""Bytes that say nothing, for a client that sends no more: it has to discard an interim answer (RFC 9110, 15.2.1), and
a chunk's size may begin with zeros (RFC 9112, 7.1). The system of a client that has left answers them with a reset."""
_PIECES, _PIECE = 4096, 64
"""Chunks that a body may come in however small they are, and bytes that further ones have on average: a chunk takes
some two microseconds, in which nobody else is served."""
_WORTH_A_LOOK = 4096
"""Bytes of a piece of a stream. Smaller ones are looked at by the sweep alone: streams that are not read pause."""
_EXTENSIONS: dict[str, dict[object, object]] = {WHOLE: {}}
"""Of every scope."""
_GONE = 7
"""TCP_CLOSE, of Linux."""


class _Phase(Enum):
    IDLE = 0
    """No byte of the next request is here."""
    HEAD = 1
    BODY = 2


class _Gone(ConnectionResetError):
    pass


def _nothing() -> None:
    pass


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
        self._task: asyncio.Task[None] | None = None
        self._refusal: RequestError | None = None
        """The answer that is due to what has arrived last. Raised as a copy: a traceback holds what its frames hold,
        the body among it, for as long as the error is kept."""
        self._deaf = False
        """Nothing more is understood; what comes is dropped."""
        self._arrived = 0
        """Bytes of the latest body, as they came or inflated."""
        self._turned_away: RequestResponseCycle | None = None
        """Whose body was refused before it was here whole, though all of it may be here before that is told."""
        self._told: RequestResponseCycle | None = None
        """Whose handler has told that it needs the body no more,"""
        self._who, self._beside = "", 0
        """who asked, and what it holds instead."""
        self.half_closed = False
        """The client sends no more, and waits for the answers to what it has sent."""

    # ------------------------------------------------------------------------------------------------------- arriving

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Of asyncio."""
        super().connection_made(transport)
        self.flow: Flow = Flow(transport)
        leaver = self.server_state.table.add(self, self._address)
        if leaver is not None:
            leaver.give_way(Overloaded("too many connections; try again", retry_after_s=1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio."""
        super().connection_lost(exc)
        self.server_state.table.remove(self)
        self.server_state.bodies.release(self)
        self._forsake()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Of asyncio: the client sends no more. It has left, or has closed its side alone and still reads; what becomes
        of the next bytes to it tells the two apart. True: the connection stays open for answers."""
        running = self._running
        if running is None or self._reads_body() or running.scope["http_version"] == "1.0":
            # Nothing is owed, or never can be; and HTTP/1.0 has no bytes that say nothing.
            return False
        if not self.half_closed:
            self.half_closed = self.flow.held = True
            if not self.pipeline:
                running.keep_alive = False
            if not running.response_started or isinstance(running.transport, Opening):
                self.transport.write(_BEFORE_HEAD)
            elif running.chunked_encoding:
                self.transport.write(_BEFORE_CHUNK)
            self.loop.call_later(_FIRST_LOOK_S, self._look, _FIRST_LOOK_S)
        return True

    def data_received(self, data: bytes) -> None:
        """Of asyncio."""
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
        """Of the parser: the first byte of a request."""
        if len(self.pipeline) >= _MAX_AHEAD:
            raise InvalidRequest(f"more than {_MAX_AHEAD} requests were sent before the first was answered")
        self._phase = _Phase.HEAD
        self._arrived = 0
        self._since = self.loop.time()
        if self._running is None:
            self.server_state.table.waits(self)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of the parser: a line of a head, or a trailer."""
        if len(self.headers) >= self._limits.max_headers:
            raise self._too_large()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Of the parser."""
        limit = self._limits.max_head_bytes
        ahead = self._running is not None
        if (self._pending > limit or ahead) and sum(len(n) + len(v) for n, v in self.headers) + len(self.url) > limit:
            raise self._too_large()
        hosts, has_body, extensions = 0, False, _EXTENSIONS
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"content-encoding":
                extensions = {**extensions, ACCOUNT: {"add": self._account, "whole": self._inflated}}
            elif name == b"transfer-encoding" or (name == b"content-length" and value.strip(b" \t0")):
                has_body = True
        if hosts != 1 and self.parser.get_http_version() == "1.1":
            raise InvalidRequest("an HTTP/1.1 request must have exactly one Host header (RFC 9112, 3.2)")
        if has_body and self.parser.should_upgrade():
            # The parser would take the body for another protocol, or for the next request.
            raise InvalidRequest(
                "a request with a body asks for an Upgrade, and this server speaks HTTP/1.1 alone; send it without the "
                "Upgrade header (Java's HttpClient: version(HTTP_1_1))"
            )
        if has_body and self.server_state.memory.tight:
            self._bound_new()
        self._pending = self._pieces = 0
        self.scope["extensions"] = {**extensions}
        super().on_headers_complete()  # raises for a target that it cannot read
        self._phase = _Phase.BODY
        self.flow.held = bool(self.pipeline)
        self.headers = []  # trailers end here: nobody reads them
        if ahead:
            self._make_room(self.server_state.bodies.add(self, _head_size(self.cycle), self._address))
        if self.server_state.leaving:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Of the parser."""
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
        """Of the parser: the last byte of a request."""
        self._pending = 0
        self._phase = _Phase.IDLE
        if self._running is not None:
            self.server_state.table.works(self)
        self.server_state.bodies.arrived(self)
        super().on_message_complete()

    # ------------------------------------------------------------------------------------------------------ answering

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._refusal is not None and (cycle.more_body or cycle is self._turned_away):
            self._say_no(self._refusal)
            return
        self._running = cycle
        task = self._task = self.loop.create_task(self._answer(cycle, app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, cycle: RequestResponseCycle, app: Any) -> None:
        transport = self.transport

        async def receive() -> Any:
            message = await cycle.receive()
            if self._refusal is not None and (cycle.more_body or cycle is self._turned_away):
                raise copy.copy(self._refusal)  # the handler's books are to say why it came to nothing
            return message

        async def send(message: Any) -> None:
            if transport.is_closing():  # `connection_lost` is on its way
                raise _Gone("the client has left")
            if not cycle.response_started:
                if self._told is not cycle:
                    self._planned()
                if (body := message.pop(WHOLE, None)) is not None:
                    if self._may_write(cycle):
                        self._write_whole(cycle, message["status"], message["headers"], body)
                        self._wrote(len(body))
                    else:
                        await send(message)
                        await send({"type": "http.response.body", "body": body})
                    return
                cycle.transport = Opening(cycle)  # type: ignore[assignment]
                await cycle.send(message)
                return
            early = cycle.more_body and not cycle.keep_alive and not message.get("more_body")
            if early:  # uvicorn would close at once, and so reset an answer to a body that is still on its way
                cycle.keep_alive = True
            await cycle.send(message)
            self._wrote(len(message.get("body", b"")))
            if early and self._has_no_room():
                self.transport.close()
            elif early:
                self._linger()

        def write(piece: bytes) -> bool:
            if transport.is_closing():
                raise _Gone("the client has left")
            # The first piece leaves with the head, and `send` knows all else.
            if self.flow.write_paused or cycle.transport is not transport or not cycle.chunked_encoding:
                return False
            transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if len(piece) > _WORTH_A_LOOK:
                self._wrote(len(piece))
            return True

        extensions: dict[str, Any] = cycle.scope["extensions"]
        extensions[PIECE] = {"write": write}
        extensions[DROPPED] = {"tell": partial(self._dropped, cycle)}
        try:
            await app(cycle.scope, receive, send)
        except asyncio.CancelledError:
            if not cycle.disconnected:
                raise
        except (Cut, _Gone):
            pass
        except Exception:
            if not cycle.disconnected:
                _log.exception("%s %s failed", cycle.scope["method"], cycle.scope["path"])
        finally:
            cycle.on_response = _nothing  # a cycle of references otherwise
            del extensions[PIECE], extensions[DROPPED]  # and others
            if self._told is cycle:
                self._told, self._who, self._beside = None, "", 0
            if not cycle.response_complete and not cycle.disconnected:
                self.transport.abort()

    def _may_write(self, cycle: RequestResponseCycle) -> bool:
        """Whether all of an answer may leave now, and nothing is special about it."""
        return not (cycle.more_body or cycle.disconnected or cycle.access_log or self.flow.write_paused)

    def _write_whole(
        self, cycle: RequestResponseCycle, status: int, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """What the cycle makes of the two messages of an answer."""
        cycle.waiting_for_100_continue = False
        cycle.response_started = cycle.response_complete = True
        lines, close = (*self.server_state.default_headers, *headers), not cycle.keep_alive
        self.transport.write(whole_answer(status, lines, body, close=close))
        cycle.message_event.set()
        if close:
            self.transport.close()
        cycle.on_response()

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
        if self.half_closed and following is None and self._refusal is None:
            self.transport.close()
            return
        if following is None or following[0].more_body:
            self.server_state.table.waits(self)
        self.flow.held = self.half_closed or bool(self.pipeline)
        self.flow.resume_reading()
        if following is not None:
            self._start_asgi_task(*following)
        elif self._refusal is not None and not (self._phase is _Phase.BODY and running is self.cycle):
            self._say_no(self._refusal)

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
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _wrote(self, size: int) -> None:
        if unread := self.unread:
            self.server_state.wrote(min(size, unread))

    @property
    def unread(self) -> int:
        """Bytes of answers that wait here for the client to read."""
        return self.transport.get_write_buffer_size()

    def give_way(self, error: Overloaded) -> None:
        """Make room for others: an idle connection ends without a word, what arrives is refused with `error`."""
        if self._deaf or self.transport.is_closing():
            return
        if self._phase is _Phase.IDLE and self._running is not None:
            self._refusal, self._deaf = error, True  # its body is here, and is being inflated: see `_account`
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

    def held(self, beside: Mapping[object, int]) -> Held[Protocol]:
        """What is known of what its request takes. `beside`: what others than the port count, by task."""
        size = self.server_state.bodies.of(self) + self.unread + self._beside + beside.get(self._task, 0)
        return Held(self._who or self._address, size, self)

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
        if self._refusal is not None:
            raise copy.copy(self._refusal)

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
            self.server_state.bodies.let_go(self, len(self.cycle.body))
        self.cycle.body = bytearray()
        self.give_way(error)

    def _dropped(self, cycle: RequestResponseCycle, beside: int, who: str) -> None:
        """The handler of a request needs its body no more, and holds so much else until it has ended."""
        self._told, self._beside, self._who = cycle, beside, who
        self._planned()

    def _planned(self) -> None:
        """The request that is answered needs its body no more. Those behind it have theirs."""
        bodies = self.server_state.bodies
        behind = sum(len(cycle.body) + _head_size(cycle) for cycle, _ in self.pipeline) if self.pipeline else 0
        if behind:
            bodies.let_go(self, bodies.of(self) - behind)
        else:
            bodies.release(self)

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
        self._refusal = error
        self._deaf = True
        if self._phase is _Phase.BODY:
            self._turned_away = self.cycle
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
            self._turned_away = self._running
            self._running.keep_alive = False
            self._running.message_event.set()
            self.loop.call_later(_LINGER_S, self._cut_short, self._running)
            return
        status, headers, body = error_answer(error)
        lines = [*self.server_state.default_headers, *((k.encode(), v.encode()) for k, v in headers.items())]
        lines.append((b"content-length", b"%d" % len(body)))
        self.transport.write(whole_answer(status, lines, body, close=True))
        self._forsake()
        if self._has_no_room():
            self.transport.close()
        else:
            self._linger()

    def _has_no_room(self) -> bool:
        """Whether this connection has to make room at once, and cannot wait for its client to read what it is told."""
        if isinstance(self._refusal, MemoryShort):
            return self.server_state.memory.critical
        return isinstance(self._refusal, Overloaded)

    def _look(self, waited: float) -> None:
        """Whether a client that sends no more has left. Reading has ended, so nobody else notices before the next
        write."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _GONE:
            self.transport.abort()
            return
        pause = min(2 * waited, _LATER_LOOKS_S)
        self.loop.call_later(pause, self._look, pause)

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
            assert self._task is not None
            self._task.cancel()
        self._running = None


def _head_size(cycle: RequestResponseCycle) -> int:
    """Bytes that the head of a request takes while it waits."""
    scope = cycle.scope
    lines = sum(len(name) + len(value) + _LINE for name, value in scope["headers"])
    return lines + len(scope["raw_path"]) + len(scope["query_string"])
