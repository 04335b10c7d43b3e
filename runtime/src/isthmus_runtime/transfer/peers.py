"""What this process asks its peers, on a few threads: who is there before it writes, and whether a drain is over.

Nothing is written to a decode that was not asked for its epoch a moment ago: a process that was restarted may have its
predecessor's port and addresses (docs/adr/0012). A peer that keeps silent costs the threads no more than one try.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from ..credentials import Credentials
from ..protocol.ticket import Ticket
from ..threads import running_pool, send
from .drain import ASK_TIMEOUT_S, Answer, ask_peer
from .greeting import NO_ANSWER, greeting_problem
from .silence import Silence
from .tickets import address_of

GREETING_S = 0.8
"""A peer that does not say its epoch within this is down."""
SILENT_S = 0.25
"""A peer that let its time pass, here or when it was asked for a drain, is left alone for this long, and then asked by
one at a time until it answers: all of its attempts would keep those of well peers waiting."""
FRESH_S = 0.25
"""A peer that said its epoch this recently is not asked again: no process is replaced, its memory registered and its
port taken, within this."""
_THREADS = 4


class Peer(NamedTuple):
    """session: TransferEngine's `host:port`; greeting: where the process of `epoch` answers."""

    session: str
    greeting: str
    epoch: str


def peer_of(ticket: Ticket) -> Peer:
    """The decode that gave the ticket."""
    return Peer(ticket.session, address_of(ticket), ticket.epoch)


class Peers:
    """Any thread may call. Answers are given to callbacks, on a thread of its own, without a lock.

    `credentials`: shown to peers that are asked for a drain.
    """

    def __init__(self, clock: Callable[[], float], credentials: Credentials | None = None) -> None:
        self._clock = clock
        self._credentials = credentials
        self._lock = threading.Lock()
        self._greeted: dict[Peer, float] = {}
        """When the process last said so."""
        self._shown: dict[str, bool] = {}
        """Of each attempt that writes, whether the peer knew its ticket."""
        self._asking: set[str] = set()
        """Attempts whose peer is being asked for a drain, or is about to be: they may be a thousand, and each would
        ask again while it waits for its turn."""
        self._silence = Silence(clock, SILENT_S, 2 * GREETING_S)
        self._threads = running_pool(_THREADS, "transfer-peers")

    def expect(self, attempt: str) -> None:
        """Writes of the attempt will follow; until `forget`."""
        with self._lock:
            self._shown.setdefault(attempt, False)

    def may_write(self, peer: Peer, attempt: str) -> bool:
        """Whether the peer said a moment ago that it is there, and knew the attempt's ticket."""
        with self._lock:
            fresh = self._clock() - self._greeted.get(peer, float("-inf")) < FRESH_S
            return fresh and self._shown.get(attempt, False)

    def greet(self, peer: Peer, claim: bytes, attempt: str, then: Callable[[str], object] = lambda _: None) -> None:
        """Ask who is there, and whether it knows the ticket; `then` is told why nothing may be written, or "".

        A dead host, too, would hold up whoever writes inside Mooncake's handshake.
        """

        def ask() -> None:
            try:
                problem = self._greeting_problem(peer, claim, attempt)
            except Exception as error:  # the operation must hear of it, whatever it is
                problem = f"decode's TransferEngine at {peer.session} cannot be asked: {error!r}"
            then(problem)

        send(self._threads, ask)

    def doubt(self, peer: Peer) -> None:
        """A write to it failed: it is greeted again before the next one."""
        with self._lock:
            self._greeted.pop(peer, None)

    def ask_drain(self, url: str, epoch: str, attempt: str, then: Callable[[Answer], object]) -> None:
        """Ask the process of `epoch` at `url` whether bytes of the attempt may still come.

        An attempt that is being asked about is not asked about again: its answer is still to come, to the same leg.
        """
        with self._lock:
            if attempt in self._asking:
                return
            self._asking.add(attempt)

        def ask() -> None:
            try:
                answer = self._drain_answer(url, epoch, attempt)
            finally:
                with self._lock:
                    self._asking.discard(attempt)
            then(answer)

        send(self._threads, ask)

    def forget(self, attempt: str) -> None:
        """The attempt writes nothing more."""
        with self._lock:
            self._shown.pop(attempt, None)

    def close(self) -> None:
        """Ask nothing more; returns when what is being asked has been answered."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _greeting_problem(self, peer: Peer, claim: bytes, attempt: str) -> str:
        asked = self._clock()
        if self._silence.lets_try(peer.greeting):
            problem = greeting_problem(peer.greeting, claim, peer.epoch, GREETING_S)
            silent = problem.startswith(NO_ANSWER) and self._clock() - asked >= GREETING_S
            self._heard(peer.greeting, silent)
        else:
            problem = f"{NO_ANSWER}: it did not a moment ago"
        with self._lock:
            self._greeted = {p: t for p, t in self._greeted.items() if p != peer and asked - t < FRESH_S}
            if not problem:
                self._greeted[peer] = asked
                if attempt in self._shown:  # else it is over
                    self._shown[attempt] = True
        return f"decode's TransferEngine at {peer.session} {problem}" if problem else ""

    def _drain_answer(self, url: str, epoch: str, attempt: str) -> Answer:
        if not self._silence.lets_try(url):
            return Answer.UNKNOWN
        asked = self._clock()
        answer = ask_peer(url, epoch, attempt, self._credentials)
        self._heard(url, silent=not answer and self._clock() - asked >= ASK_TIMEOUT_S)
        return answer

    def _heard(self, address: str, silent: bool) -> None:
        if silent:
            self._silence.note(address)
        else:
            self._silence.over(address)
