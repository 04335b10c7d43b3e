"""How an answer leaves: its bytes, and in as few pieces as may be."""

from __future__ import annotations

from collections.abc import Iterable

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle


def whole_answer(status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, close: bool) -> bytes:
    """Head and body; `close`: the head says that it is the connection's last."""
    lines = b"".join([b"%b: %b\r\n" % line for line in headers])
    return b"%b%b%b\r\n%b" % (STATUS_LINE[status], lines, b"connection: close\r\n" if close else b"", body)


class Flow(FlowControl):
    """uvicorn reads on whenever a request is read or answered; not so while others wait in line."""

    held = False

    def resume_reading(self) -> None:
        """Unless held."""
        if not self.held:
            super().resume_reading()


class Opening:
    """Stands for the transport of a cycle until the first piece of its answer, with which the head then leaves: a
    system call less, and one less for the client to wake up for."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head = b""

    def write(self, data: bytes) -> None:
        """First the head, then the piece."""
        if self._head:
            self.flush(data)
        else:
            self._head = data

    def flush(self, data: bytes = b"") -> None:
        """The head and `data` leave."""
        self._cycle.transport = self._transport
        self._transport.write(self._head + data)

    def close(self) -> None:
        """After an answer without a body."""
        self.flush()
        self._transport.close()
