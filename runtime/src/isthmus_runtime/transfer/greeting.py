"""Which process listens at an address: decode says its epoch to whoever connects, and prefill asks before it writes.

Addresses and ports of a process may be those of the one that was there before it. A write of an attempt that the
earlier one reserved would land in blocks of other requests, and TransferEngine would not mind.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from .bounded import split_address

MAX_EPOCH_BYTES = 128
_SEND_S = 1.0


class Greeter:
    """Says `epoch`, a line, to every connection at `host` on a port of its own, and closes it."""

    def __init__(self, host: str, epoch: str) -> None:
        self._line = epoch.encode() + b"\n"
        assert len(self._line) <= MAX_EPOCH_BYTES, f"epoch of {len(epoch)} bytes, the limit is {MAX_EPOCH_BYTES - 1}"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=512)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="transfer-greeter", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return  # closed
            with peer, contextlib.suppress(OSError):  # a peer that left has lost nothing
                peer.settimeout(_SEND_S)
                peer.sendall(self._line)

    def close(self) -> None:
        """Accept nothing more."""
        with contextlib.suppress(OSError):  # not connected, which a listening socket never is
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


def greeting_problem(address: str, epoch: str, timeout_s: float) -> str:
    """Empty when the process of `epoch` answers at `address` within `timeout_s` (to connect, and to answer), else why
    not."""
    try:
        with socket.create_connection(split_address(address), timeout_s) as peer:
            line = b""
            while not line.endswith(b"\n") and len(line) < MAX_EPOCH_BYTES:
                part = peer.recv(MAX_EPOCH_BYTES)
                if not part:
                    break
                line += part
    except (OSError, ValueError) as error:
        return f"does not answer: {error}"
    found = line.decode(errors="replace").strip()
    return "" if found == epoch else f"is another process by now: {found or 'nothing'} answers, not {epoch}"
