"""What the kernel holds of a connection after its process has closed it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

import pytest

from isthmus_runtime.transfer.sockets import (
    addresses_of,
    end_connections_from,
    listening_ports,
    parse_table,
    probe_accepted,
    stuck_bytes_to,
)

# Addresses of 127.0.0.0/8 that nothing else on this machine talks to, another process with these tests included.
SENDER, RECEIVER = (f"127.{64 + os.getpid() // 250 % 64}.{os.getpid() % 250}.{last}" for last in (1, 2))

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0200A8C0:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1 00 100 0 0 10 0
   1: 0200A8C0:A6B8 0400A8C0:3ECC 04 00000899:00000000 01:0000001A 00000005     0        0 0 2 0000000000000000
   2: 0200A8C0:A6BA 0400A8C0:3ECC 01 00000000:00000000 02:00000100 00000000     0        0 77 2 0000000000000000
"""
TABLE6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when ...
   0: 0000000000000000FFFF00000200A8C0:3E2A 0000000000000000FFFF00000300A8C0:D3E4 01 00000010:00000000 01:0000001A 00000000     0        0 5 1
   1: B80D0120000000000000000001000000:3E2A B80D0120000000000000000002000000:D3E4 01 00000000:00000000 00:00000000 00000000     0        0 6 1
"""  # fmt: skip # noqa: E501


def test_the_kernels_table_is_read() -> None:
    orphan, idle = parse_table(TABLE)
    assert (orphan.peer, orphan.unsent, orphan.retries, orphan.orphan) == ("192.168.0.4", 0x899, 5, True)
    assert (idle.peer, idle.unsent, idle.retries, idle.orphan) == ("192.168.0.4", 0, 0, False)
    mapped, six = parse_table(TABLE6)
    assert (mapped.peer, mapped.unsent, mapped.orphan) == ("192.168.0.3", 16, False)
    assert six.peer == "2001:db8::2"


def test_a_name_without_an_address_has_none() -> None:
    assert addresses_of("no-such-host.invalid") == frozenset()
    assert addresses_of("[::1]") == {"::1"}


def test_the_kernel_probes_what_is_accepted_from_then_on() -> None:
    with socket.create_server((RECEIVER, 0)) as listener:
        assert probe_accepted() >= 1
        with socket.create_connection(listener.getsockname()) as there:
            here, _ = listener.accept()
            with here:
                assert here.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert here.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
                assert here.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000
            assert not there.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def pair() -> tuple[socket.socket, socket.socket, int]:
    """A connection from SENDER to RECEIVER: both ends, and the port it was accepted on."""
    with socket.create_server((RECEIVER, 0)) as listener:
        port = listener.getsockname()[1]
        assert port in listening_ports()
        there = socket.create_connection((RECEIVER, port), source_address=(SENDER, 0))
        here, _ = listener.accept()
    return there, here, port


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not condition():
        if time.monotonic() > end:
            return False
    return True


def test_bytes_of_a_closed_connection_count_until_the_peer_took_them() -> None:
    there, here, _ = pair()
    with here:
        assert not stuck_bytes_to(RECEIVER)
        there.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                there.send(bytes(65536))
        there.close()
        assert stuck_bytes_to(RECEIVER)
        while here.recv(1 << 20):
            pass
        assert eventually(lambda: not stuck_bytes_to(RECEIVER))


def test_what_a_lost_peer_still_sends_is_refused() -> None:
    there, here, port = pair()
    with there, here:
        assert end_connections_from(SENDER, frozenset({port + 1})) == 0
        assert end_connections_from(RECEIVER, frozenset({port})) == 0
        before = os.listdir("/proc/self/fd")
        listening_ports()
        assert len(os.listdir("/proc/self/fd")) == len(before), "descriptors leaked"
        there.sendall(b"before")
        assert here.recv(6) == b"before"
        assert end_connections_from(SENDER, frozenset({port})) == 1
        assert here.recv(6) == b""
        there.settimeout(5)
        with pytest.raises(ConnectionError):
            for _ in range(100):
                there.sendall(b"after")
        with contextlib.suppress(ConnectionResetError):
            assert here.recv(6) == b""
