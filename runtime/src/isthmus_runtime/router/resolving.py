"""From a name to the addresses of the engines behind it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

from ..own_namespace import absolute

_NO_SUCH_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}

Resolve = Callable[[str, int], Awaitable[set[str]]]


async def resolve_all(host: str, port: int) -> set[str]:
    """All IPv4 and IPv6 addresses of `host`; empty when the name does not exist (a headless Service without pods). In a
    pod a name without a dot is that of a Service of its namespace.

    Raises OSError when the resolver cannot tell.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(absolute(host), port, type=socket.SOCK_STREAM)
    except socket.gaierror as e:
        if e.errno in _NO_SUCH_NAME:
            return set()
        raise
    return {str(entry[4][0]) for entry in found}


def engine_url(ip: str, port: str) -> str:
    """Where an engine at this address is asked."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    return f"http://[{ip}]:{port}" if address.version == 6 else f"http://{ip}:{port}"
