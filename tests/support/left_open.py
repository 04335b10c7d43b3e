"""Sockets that a test leaves open, which the collector would find in the time of a later one."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

CLOSING_S = 5.0
"""For threads that are ending: what the collector has to find is open still."""


def open_sockets() -> dict[str, int]:
    """Descriptors of this process, by the inode of the socket."""
    found = dict[str, int]()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing
            continue
        if target.startswith("socket:"):
            found[target] = int(name)
    return found


def described(descriptor: int) -> str:
    """Its two ends, as far as it has them."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            try:
                peer = str(one.getpeername())
            except OSError:
                peer = "nobody"
            return f"{one.getsockname()} to {peer}"
    except OSError as error:
        return str(error)


@contextmanager
def none_left_open() -> Iterator[None]:
    """AssertionError that names those which were not there before."""
    before = open_sockets()
    yield
    end, pause = time.monotonic() + CLOSING_S, threading.Event()
    while left := [descriptor for name, descriptor in open_sockets().items() if name not in before]:
        assert time.monotonic() < end, f"left open: {'; '.join(described(one) for one in left)}"
        pause.wait(0.01)
