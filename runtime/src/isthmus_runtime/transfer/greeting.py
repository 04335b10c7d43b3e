"""Which process listens at an address: decode says its epoch to whoever shows a ticket of its own, and prefill asks
before it writes.

Addresses and ports of a process may be those of the one that was there before it. A write of an attempt that the
earlier one reserved would land in blocks of other requests, and TransferEngine would not mind. Nor would it mind a
ticket that was changed on its way, or that of an attempt which is over.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

from .bounded import split_address
from .tickets import MAX_CLAIM_BYTES

NO_ANSWER = "does not answer"
MAX_ANSWER_BYTES = 512
_SAY_S = 1.0
"""From connecting to the last byte of what a peer has to say."""
_MAX_PEERS = 256
"""More at once are strangers: a peer says its line at once. The one that has waited longest gives way."""
_QUIET_S = 30.0
"""Between two messages in the log that no peer can be greeted: there would be ten a second."""
_REFUSED = "refused: "
_log = logging.getLogger(__name__)


class Greeter:
    """Answers each connection at `host`, on a port of its own: by `epoch` when `problem` finds none in the line that
    was said, else by the problem. One thread for all of them, none of which can hold up the others."""

    def __init__(self, host: str, epoch: str, problem: Callable[[bytes], str]) -> None:
        assert len(epoch) < MAX_ANSWER_BYTES, f"epoch of {len(epoch)} bytes, the limit is {MAX_ANSWER_BYTES - 1}"
        self._epoch = epoch
        self._problem = problem
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=512)
        self._socket.setblocking(False)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._closing = threading.Event()
        self._quiet_until = 0.0
        self._peers: dict[socket.socket, tuple[float, bytes]] = {}
        """By when each must have said its line, and what it said so far; the longest there first."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="transfer-greeter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept nothing more."""
        self._closing.set()
        with contextlib.suppress(OSError):  # not connected, which a listening socket never is
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_SAY_S)
        self._socket.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(_SAY_S / 4 if self._peers else None):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._socket:
                    self._accept()
                else:
                    self._hear(sock)
            now = time.monotonic()
            for peer in [peer for peer, (until, _) in self._peers.items() if until < now]:
                self._drop(peer)
        for peer in tuple(self._peers):
            self._drop(peer)
        self._selector.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Descriptors are short: others give some back.
            if not self._closing.wait(0.1) and (now := time.monotonic()) > self._quiet_until:
                self._quiet_until = now + _QUIET_S
                _log.warning("a peer could not be greeted: %s; told once in %g s", error, _QUIET_S)
            return
        if len(self._peers) >= _MAX_PEERS:
            self._drop(next(iter(self._peers)))
        peer.setblocking(False)
        self._peers[peer] = time.monotonic() + _SAY_S, b""
        self._selector.register(peer, selectors.EVENT_READ)

    def _hear(self, peer: socket.socket) -> None:
        if peer not in self._peers:
            return  # gave way in this very round
        until, said = self._peers[peer]
        try:
            part = peer.recv(MAX_CLAIM_BYTES)
        except OSError:
            part = b""
        said += part
        if part and b"\n" not in said and len(said) <= MAX_CLAIM_BYTES:
            self._peers[peer] = until, said
            return
        if part:
            problem = self._problem(said.partition(b"\n")[0])
            line = f"{_REFUSED}{problem}" if problem else self._epoch
            with contextlib.suppress(OSError):  # a peer that left has lost nothing
                peer.send(line.encode()[: MAX_ANSWER_BYTES - 1] + b"\n")
        self._drop(peer)

    def _drop(self, peer: socket.socket) -> None:
        del self._peers[peer]
        self._selector.unregister(peer)
        peer.close()


def greeting_problem(address: str, claim: bytes, epoch: str, timeout_s: float) -> str:
    """Empty when the process of `epoch` answers to `claim` at `address` within `timeout_s` (to connect, and to answer),
    else why not."""
    try:
        with socket.create_connection(split_address(address), timeout_s) as peer:
            peer.sendall(claim + b"\n")
            line = b""
            while not line.endswith(b"\n") and len(line) < MAX_ANSWER_BYTES:
                part = peer.recv(MAX_ANSWER_BYTES)
                if not part:
                    break
                line += part
    except (OSError, ValueError) as error:
        return f"{NO_ANSWER}: {error}"
    found = line.decode(errors="replace").strip()
    if found.startswith(_REFUSED):
        return f"refuses the ticket: {found.removeprefix(_REFUSED)}"
    return "" if found == epoch else f"is another process by now: {found or 'nothing'} answers, not {epoch}"
