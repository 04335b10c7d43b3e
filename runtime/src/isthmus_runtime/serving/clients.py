"""Who a connection is from, for turns and shares of clients."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address, ip_address


@lru_cache(4096)
def known_by(host: str) -> str:
    """The address itself; of IPv6 its first 64 bits, as every host has all addresses with them (RFC 4291, 2.5.1)."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64"
