"""The name server of the network: it knows the members, and can fail for single ones.

`ROLE.chaos` has the addresses of all members of a role, as a headless Service has those of its pods.
"""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import cast

SUFFIX = "chaos"
_ANSWER, _SERVFAIL, _NXDOMAIN = 0x8580, 0x8182, 0x8583
_A = 1


def resolv_conf(folder: Path, server: str) -> Path:
    """What members have as /etc/resolv.conf: the C library's own deadlines, shortened for a storm."""
    file = folder / "resolv.conf"
    file.write_text(f"nameserver {server}\noptions timeout:2 attempts:2\n")
    return file


def entering(conf: Path) -> list[str]:
    """The command prefix that starts a program with `conf` as its resolver's configuration; it keeps the pid."""
    return ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/resolv.conf && exec "$@"', str(conf)]


class NameServer(asyncio.DatagramProtocol):
    """Answers at UDP port 53."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        """`addresses`: of members, by name."""
        self.failing: dict[str, str] = {}
        """Member -> `silent`, or `servfail`."""
        self.unanswered = 0
        """Questions that met a failure."""
        self._member = {address: name for name, address in addresses.items()}
        self._found: dict[str, list[str]] = {}
        for name, address in addresses.items():
            self._found.setdefault(f"{name.rstrip('0123456789')}.{SUFFIX}", []).append(address)

    async def start(self, host: str) -> None:
        """Listen until the loop ends."""
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, local_addr=(host, 53))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # Python 3.11's own is no subclass

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        name, kind, question = _question(data)
        failure = self.failing.get(self._member.get(addr[0], ""), "")
        self.unanswered += bool(failure)
        if failure == "silent":
            return
        found = self._found.get(name)
        flags = _SERVFAIL if failure else _NXDOMAIN if found is None else _ANSWER
        records = found if found and kind == _A and not failure else []
        answer = data[:2] + struct.pack("!HHHHH", flags, 1, len(records), 0, 0) + question
        for address in records:
            answer += struct.pack("!HHHIH", 0xC00C, _A, 1, 0, 4) + ipaddress.IPv4Address(address).packed
        self._transport.sendto(answer, addr)


def _question(data: bytes) -> tuple[str, int, bytes]:
    """Name, type, and the bytes of the first question of a message."""
    labels, place = [], 12
    while size := data[place]:
        labels.append(data[place + 1 : place + 1 + size].decode())
        place += 1 + size
    return ".".join(labels).lower(), int.from_bytes(data[place + 1 : place + 3], "big"), data[12 : place + 5]
