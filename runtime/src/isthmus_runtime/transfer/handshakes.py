"""The first write to a TransferEngine, which waits for the other one's answer: with a bound.

Mooncake asks a session for its segments when it is first written to. It waits a minute for the answer of a process that
accepts the connection and says nothing, under a lock that every other write takes, and offers no deadline. What can be
done from outside is to end the connection that it waits on.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from ..threads import running_pool, send
from .bounded import split_address
from .silence import Silence
from .sockets import end_connections_to

_log = logging.getLogger(__name__)

ANSWER_S = 1.0
"""A TransferEngine that does not answer within this is silent."""
SILENT_S = 10.0
"""Nothing is tried with it for this long: each try holds up all other writes."""

MOST_MET = 4096
"""Engines come and go, each with a port of its own. One that is forgotten is watched at its next write, which costs a
task on a thread."""


class Handshakes:
    """Submits writes for one thread, and knows who has answered. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._met: OrderedDict[str, None] = OrderedDict()
        """Mooncake asks none of them again; the one that was written to longest ago first."""
        self._silent = Silence(clock, SILENT_S)
        self._watch = running_pool(1, "transfer-handshakes")

    def silent(self, session: str) -> bool:
        """Whether the session `host:port` has not answered a moment ago, and is not tried."""
        return self._silent.holds(session)

    def submit(self, session: str, write: Callable[[], int]) -> int:
        """What `write` gives, after ANSWER_S or little more; 0 for a session that is silent. ValueError: it is none."""
        if session in self._met:
            self._met.move_to_end(session)
            return write()
        if self.silent(session):
            return 0
        answered, late = threading.Event(), threading.Event()
        send(self._watch, _end_unanswered, *split_address(session), answered, late)
        try:
            transfer = write()
        finally:
            answered.set()
        if late.is_set():
            _log.warning("the TransferEngine at %s has not answered within %g s", session, ANSWER_S)
            self._silent.note(session)
        elif started(transfer):
            self._met[session] = None
            while len(self._met) > MOST_MET:
                self._met.popitem(last=False)
        return transfer

    def close(self) -> None:
        """Returns when no write waits any more."""
        self._watch.shutdown(wait=True)


def started(transfer: int) -> bool:
    """Mooncake answers 0, or -1 as signed or unsigned 64 bits, for a transfer that it did not take."""
    return transfer not in (0, -1, 2**64 - 1)


def _end_unanswered(host: str, port: int, answered: threading.Event, late: threading.Event) -> None:
    while not answered.wait(ANSWER_S):
        late.set()
        end_connections_to(host, port)
