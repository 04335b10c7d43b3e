"""The request of a connection that is being answered: its task, what its handler reads, and how the answer leaves."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from ..errors import RequestError
from .call import DROPPED, PIECE, WHOLE, Cut
from .writing import Flow, Opening, whole_answer

_log = logging.getLogger(__name__)

_WORTH_A_LOOK = 4096
"""Bytes of a piece of a stream. Smaller ones are looked at by the sweep alone: streams that are not read pause."""


class Gone(ConnectionResetError):
    """The client has left; `connection_lost` is on its way."""


class Asker(Protocol):
    """The connection that a request has come by."""

    transport: asyncio.Transport
    flow: Flow
    refusal: RequestError | None
    """The answer that is due to what has arrived last. Raised as a copy: a traceback holds what its frames hold, the
    body among it, for as long as the error is kept."""

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every answer, as of now."""

    def planned(self) -> None:
        """The request that is answered needs its body no more."""

    def wrote(self, size: int) -> None:
        """Note that so many bytes more of an answer were written."""

    def answered(self, one: Answering) -> None:
        """Its handler has ended."""

    def close_early(self) -> None:
        """Answered before all of it was here: close so that the answer can be read."""


def _nothing() -> None:
    pass


class Answering:
    """One request from its turn on."""

    __slots__ = ("_asker", "_transport", "beside", "cycle", "task", "told", "turned_away", "who")

    def __init__(self, asker: Asker, cycle: RequestResponseCycle) -> None:
        self._asker = asker
        self._transport = asker.transport
        self.cycle = cycle
        self.task: asyncio.Task[None] | None = None
        self.told = False
        """Its handler has told that it needs the body no more,"""
        self.who, self.beside = "", 0
        """who asked, and what it holds instead."""
        self.turned_away = False
        """Its body was refused before it was here whole, though all of it may be here before that is told."""

    async def run(self, app: Any) -> None:
        """Have `app` answer it. The task that does is cancelled when the client leaves."""
        cycle = self.cycle
        extensions: dict[str, Any] = cycle.scope["extensions"]
        extensions[PIECE] = {"write": self._write}
        extensions[DROPPED] = {"tell": self._dropped}
        try:
            await app(cycle.scope, self._receive, self._send)
        except asyncio.CancelledError:
            if not cycle.disconnected:
                raise
        except (Cut, Gone):
            pass
        except Exception:
            if not cycle.disconnected:
                _log.exception("%s %s failed", cycle.scope["method"], cycle.scope["path"])
        finally:
            cycle.on_response = _nothing  # a cycle of references otherwise
            del extensions[PIECE], extensions[DROPPED]  # and others
            self._asker.answered(self)
            if not cycle.response_complete and not cycle.disconnected:
                self._transport.abort()

    async def _receive(self) -> Any:
        message = await self.cycle.receive()
        refusal = self._asker.refusal
        if refusal is not None and (self.cycle.more_body or self.turned_away):
            raise copy.copy(refusal)  # the handler's books are to say why it came to nothing
        return message

    async def _send(self, message: Any) -> None:
        cycle = self.cycle
        if self._transport.is_closing():
            raise Gone("the client has left")
        if not cycle.response_started:
            if not self.told:
                self._asker.planned()
            if (body := message.pop(WHOLE, None)) is None:
                cycle.transport = Opening(cycle)  # type: ignore[assignment]
                await cycle.send(message)
            elif self._may_write_whole():
                self._write_whole(message["status"], message["headers"], body)
            else:
                await self._send(message)
                await self._send({"type": "http.response.body", "body": body})
            return
        early = cycle.more_body and not cycle.keep_alive and not message.get("more_body")
        if early:  # uvicorn would close at once, and so reset an answer to a body that is still on its way
            cycle.keep_alive = True
        await cycle.send(message)
        self._asker.wrote(len(message.get("body", b"")))
        if early:
            self._asker.close_early()

    def _write(self, piece: bytes) -> bool:
        transport = self._transport
        if transport.is_closing():
            raise Gone("the client has left")
        # The first piece leaves with the head, and `_send` knows all else.
        cycle = self.cycle
        if self._asker.flow.write_paused or cycle.transport is not transport or not cycle.chunked_encoding:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if len(piece) > _WORTH_A_LOOK:
            self._asker.wrote(len(piece))
        return True

    def _dropped(self, beside: int, who: str) -> None:
        """Its handler needs the body no more, and holds so much else until it has ended."""
        self.told, self.beside, self.who = True, beside, who
        self._asker.planned()

    def _may_write_whole(self) -> bool:
        """Whether all of an answer may leave now, and nothing is special about it."""
        cycle = self.cycle
        return not (cycle.more_body or cycle.disconnected or cycle.access_log or self._asker.flow.write_paused)

    def _write_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """What the cycle makes of the two messages of an answer."""
        cycle = self.cycle
        cycle.waiting_for_100_continue = False
        cycle.response_started = cycle.response_complete = True
        lines, close = (*self._asker.default_headers, *headers), not cycle.keep_alive
        self._transport.write(whole_answer(status, lines, body, close=close))
        cycle.message_event.set()
        if close:
            self._transport.close()
        cycle.on_response()
        self._asker.wrote(len(body))
