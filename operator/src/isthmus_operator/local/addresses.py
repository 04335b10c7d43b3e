"""Loopback addresses for local pods: each pod has its own, so that every pod may use the ports of its manifest."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from ..errors import UserError
from ..render.names import Component


def is_free(address: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        # As servers do; without it, connections of an earlier run in TIME_WAIT would count as a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


class Addresses:
    """Hands out 127.88.x.y for pods, and 127.0.0.1 for the router."""

    def __init__(self) -> None:
        # Runs side by side begin in different places; is_free settles the rest.
        self._block = os.getpid() % 254 + 1
        self._next = 1

    def take(self, pod: str, role: str, ports: Sequence[int]) -> str:
        """An address on which all ports are free. UserError when the router's port is taken."""
        if role == Component.ROUTER.value:
            for port in ports:
                if not is_free("127.0.0.1", port):
                    raise UserError(
                        f"port {port} of 127.0.0.1, for the router, is in use by another program; stop that program, or"
                        " choose another port with --port"
                    )
            return "127.0.0.1"
        while self._next < 255:
            address = f"127.88.{self._block}.{self._next}"
            self._next += 1
            if all(is_free(address, port) for port in ports):
                return address
        raise UserError(
            f"no address of 127.88.{self._block}.0/24 has the ports {', '.join(map(str, ports))} free for {pod};"
            " a program listens on them on all addresses (0.0.0.0): stop it"
        )
