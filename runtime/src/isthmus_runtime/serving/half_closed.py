"""A client that sends no more has left, or has closed its side alone and still reads. What becomes of the next bytes to
it tells the two apart, and only who looks is told."""

from __future__ import annotations

import asyncio
import socket

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from .writing import Opening

_FIRST_LOOK_S, _LATER_LOOKS_S = 0.005, 1.0
"""When to look whether the client has left: once the answer of a host nearby is here, then later and later, but at
least this often."""
_BEFORE_HEAD, _BEFORE_CHUNK = b"HTTP/1.1 100 Continue\r\n\r\n", b"0"
"""Bytes that say nothing: a client has to discard an interim answer (RFC 9110, 15.2.1), and a chunk's size may begin
with zeros (RFC 9112, 7.1). The system of a client that has left answers them with a reset."""
_GONE = 7
"""TCP_CLOSE, of Linux."""


def watch(transport: asyncio.Transport, answered: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
    """Abort the connection once it shows that its client has left. `answered`: the request whose answer is due."""
    if not answered.response_started or isinstance(answered.transport, Opening):
        transport.write(_BEFORE_HEAD)
    elif answered.chunked_encoding:
        transport.write(_BEFORE_CHUNK)
    loop.call_later(_FIRST_LOOK_S, _look, transport, loop, _FIRST_LOOK_S)


def _look(transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, waited: float) -> None:
    # Reading has ended, so nobody else notices before the next write.
    if transport.is_closing():
        return
    if transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _GONE:
        transport.abort()
        return
    pause = min(2 * waited, _LATER_LOOKS_S)
    loop.call_later(pause, _look, transport, loop, pause)
