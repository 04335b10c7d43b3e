"""What only the kernel knows of a peer's TCP connections, and how to act on it. Linux only.

Mooncake closes a connection whose write failed, and the kernel goes on sending what was in its buffer: after a cut of
some seconds it arrives seconds late, at addresses that may be in use for something else by then. The side that wrote
can see such connections in /proc/net/tcp; the side written to can end the connections it accepted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_CLOSED, _LISTEN = 0x07, 0x0A
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Seconds, seconds, times, milliseconds: a peer is silent for good after 25 s, idle or not."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One line of /proc/net/tcp: who is at the other end, and what it has not acknowledged."""

    peer: str
    unsent: int
    """Bytes written and not acknowledged."""
    retries: int
    """Retransmissions without an answer: the peer or the way to it is silent."""
    orphan: bool
    """Closed by its process; the kernel sends what is left."""


def parse_table(text: str) -> list[Connection]:
    """Connections in the text of /proc/net/tcp or tcp6. IPv4 inside IPv6 is given as IPv4."""
    found: list[Connection] = []
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) < 10 or int(words[3], 16) in (_CLOSED, _LISTEN):
            continue
        found.append(
            Connection(
                peer=_address(words[2].partition(":")[0]),
                unsent=int(words[4].partition(":")[0], 16),
                retries=int(words[6], 16),
                orphan=words[9] == "0",
            )
        )
    return found


def _address(text: str) -> str:
    # Words of 32 bits, each in the machine's byte order.
    raw = b"".join(struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8))
    if len(raw) == 4:
        return str(IPv4Address(raw))
    address = IPv6Address(raw)
    return str(address.ipv4_mapped or address)


def stuck_bytes_to(host: str) -> bool:
    """Whether the kernel holds bytes for `host` on a connection that was closed, or that gets no answer. True, too,
    where that cannot be told, as in a process without a descriptor left."""
    try:
        peers = addresses_of(host)
        for table in _TABLES:
            with contextlib.suppress(FileNotFoundError):  # no IPv6 in this kernel
                for connection in parse_table(Path(table).read_text()):
                    if connection.peer in peers and connection.unsent and (connection.orphan or connection.retries):
                        return True
    except OSError:
        return True
    return False


def listening_ports() -> frozenset[int]:
    """TCP ports on which this process listens."""
    return frozenset(
        sock.getsockname()[1] for sock in _sockets() if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def probe_accepted() -> int:
    """Let the kernel end connections whose other end vanished without a word. Returns the listening sockets set so.

    Whatever is accepted on a socket that listens now inherits this. Neither Mooncake nor an idle HTTP connection would
    ever find out: each such peer would leave its connections here for good.
    """
    count = 0
    for sock in _sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PROBES.items():
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            count += 1
    return count


def end_connections_from(host: str, ports: frozenset[int]) -> int:
    """End what this process accepted from `host` on `ports`; later bytes are answered by a reset. Returns how many."""
    return _end(host, lambda sock: sock.getsockname()[1] in ports)


def end_connections_to(host: str, port: int) -> int:
    """End this process's connections to `port` of `host`: who waits for an answer there gets an end. Returns how
    many."""
    return _end(host, lambda sock: sock.getpeername()[1] == port)


def _end(host: str, chosen: Callable[[socket.socket], bool]) -> int:
    peers, ended = addresses_of(host), 0
    for sock in _sockets():
        try:
            peer = ip_address(sock.getpeername()[0].partition("%")[0])
            mapped = peer.ipv4_mapped if isinstance(peer, IPv6Address) else None
            if str(mapped or peer) in peers and chosen(sock):
                sock.shutdown(socket.SHUT_RDWR)
                ended += 1
        except OSError:
            continue  # not connected, or just closed
    return ended


def addresses_of(host: str) -> frozenset[str]:
    """IP addresses of `host`; empty when it has none."""
    try:
        return frozenset(str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host.strip("[]"), None))
    except OSError:
        return frozenset()


def _sockets() -> Iterator[socket.socket]:
    """Every TCP socket of this process, as a duplicate that closes itself."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue  # just closed
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue  # not a socket
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock
