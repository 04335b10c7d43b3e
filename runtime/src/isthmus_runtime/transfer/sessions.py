"""The TransferEngines through which peers may write here: one for new tickets, and earlier ones on their way out.

A peer whose node is lost never says that it writes no more, and one that stood still for an hour may go on in the midst
of a write. What it writes through is this side's: when every ticket of an engine is over or given up, the engine is
closed, with its ports and connections, and nothing can come through it any more (docs/adr/0063).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ..errors import ConfigError
from ..threads import running_pool, send
from .native_engine import NativeEngine
from .sockets import listening_ports

_log = logging.getLogger(__name__)

SILENT_S = 30.0
"""A peer that was asked for so long whether it still writes, and has not acknowledged that it does not: most cuts of a
network are shorter, and so is most of what holds a process up."""
AGAIN_S = 60.0
"""After an engine that could not be started, or not closed."""
TRIES = 8
"""For an engine whose ports none before it had: a peer that goes on may still have an address of that one."""


@dataclass(slots=True, eq=False)
class _Session:
    native: NativeEngine
    attempts: dict[str, float | None] = field(default_factory=dict)
    """Those with a ticket of this engine that are not over; since when they are given up, None: they are not."""
    closed: bool = False


class Sessions:
    """Any thread may call. `start`: makes an engine over the same memory; None: engines cannot be replaced here."""

    def __init__(
        self,
        first: NativeEngine,
        start: Callable[[], NativeEngine] | None,
        changed: Callable[[NativeEngine], None] = lambda native: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`changed` is told of the engine for new tickets: whoever uses the one before is to let go of it."""
        self._start = start
        self._changed = changed
        self._clock = clock
        self._lock = threading.Lock()
        self._current = _Session(first)
        self._through: dict[str, _Session] = {}
        self._used = set(first.ports)
        self._busy = False
        self._again_at = float("-inf")
        self._threads = running_pool(1, "transfer-sessions")

    @property
    def native(self) -> NativeEngine:
        """The engine for new tickets."""
        return self._current.native

    def reserve(self, attempt: str) -> NativeEngine:
        """Whom the ticket of this attempt names."""
        with self._lock:
            session = self._through[attempt] = self._current
            session.attempts[attempt] = None
            return session.native

    def ports_of(self, attempt: str) -> frozenset[int]:
        """Where peers write for this attempt."""
        with self._lock:
            session = self._through.get(attempt, self._current)
            return session.native.ports

    def forget(self, attempt: str) -> None:
        """The attempt is over, and drained."""
        with self._lock:
            session = self._through.pop(attempt, None)
            if session is not None:
                session.attempts.pop(attempt, None)

    def shut(self, attempt: str) -> bool:
        """The attempt is given up, and its peer has not acknowledged that it writes no more. True: nobody can.

        Replaces the engine where that has been so for long, and closes it when all its other attempts are over or given
        up, too. Both take a second, on a thread of its own: ask again.
        """
        with self._lock:
            session = self._through.get(attempt)
            if session is None or session.closed:
                return session is not None
            now = self._clock()
            since = session.attempts.get(attempt)
            if since is None:
                since = session.attempts[attempt] = now
            if self._start is None or self._busy or now < max(since + SILENT_S, self._again_at):
                return False
            if session is self._current:
                work = self._replace
            elif None not in session.attempts.values():
                work = partial(self._close, session)
            else:
                return False
            self._busy = True
        send(self._threads, self._do, work)
        return False

    def close(self) -> None:
        """Replace nothing more."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    # ----------------------------------------------------------------------------------------------------- the thread

    def _do(self, work: Callable[[], bool]) -> None:
        done = False
        try:
            done = work()
        finally:
            with self._lock:
                self._busy = False
                self._again_at = self._clock() + (0.0 if done else AGAIN_S)

    def _replace(self) -> bool:
        try:
            native = self._unlike()
        except ConfigError as error:
            _log.warning("no other TransferEngine could be started, blocks stay set aside: %s", error)
            return False
        with self._lock:
            before, self._current = self._current, _Session(native)
            live = sum(since is None for since in before.attempts.values())
        self._changed(native)
        _log.warning(
            "a peer has not said for %g s that it writes no more: new tickets name %s, and %s closes when %d transfers "
            "have ended",
            SILENT_S,
            native.session,
            before.native.session,
            live,
        )
        return True

    def _unlike(self) -> NativeEngine:
        assert self._start is not None
        unfit: list[NativeEngine] = []  # kept meanwhile: the next one cannot get their ports
        while len(unfit) < TRIES:
            native = self._start()
            if not native.ports & self._used:
                self._used |= native.ports
                return native
            unfit.append(native)
        raise ConfigError(f"each of {TRIES} had a port that an earlier one had")

    def _close(self, session: _Session) -> bool:
        """The engine ends with the last that holds it; that takes a second, in which no thread of Python runs."""
        ports, name, count = session.native.ports, session.native.session, len(session.attempts)
        # Its ports are kept: where somebody still holds the engine, this is tried again.
        session.native = NativeEngine(None, name, ports, session.native.effective)
        if left := sorted(listening_ports() & ports):
            _log.error(
                "TransferEngine %s still listens on %s: blocks of %d transfers stay set aside", name, left, count
            )
            return False
        session.closed = True
        _log.warning("TransferEngine %s is closed: blocks of %d transfers are free", name, count)
        return True
