"""Where a hub may send its client for the files that it lists: no nearer to this process than the hub itself is.

A hub answers with addresses of other hosts, where its files are, and its client asks whatever they name. A pod reaches
more than strangers do: services of its cluster, its own loopback, and what a cloud tells a machine of itself, which may
hold credentials. So the address that a connection really has is looked at before a byte is said on it, which a name
that is resolved twice does not get round.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from enum import IntEnum
from typing import Any
from urllib.parse import urlsplit

from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from ..errors import WeightsError


class Nearness(IntEnum):
    """How near an address is to this process."""

    PUBLIC = 0
    PRIVATE = 1
    """Of networks that are not the Internet: a cluster's services and pods, among others."""
    LOOPBACK = 2
    LINK = 3
    """Of this link alone, where clouds answer machines about themselves."""


_OF_CLOUDS = frozenset({"168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254"})
"""Where Azure, Alibaba, Oracle and, by IPv6, Amazon answer a machine about itself."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def nearness(address: str) -> Nearness:
    """How near an IP address is, also one inside of another. ValueError: it is none."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        ip = inner or ip
    if ip.is_link_local or str(ip) in _OF_CLOUDS:
        return Nearness.LINK
    if ip.is_loopback or ip.is_unspecified:
        return Nearness.LOOPBACK
    return Nearness.PUBLIC if ip.is_global and not ip.is_multicast else Nearness.PRIVATE


class NoNearer(HTTPAdapter):
    """For sessions of `requests` that talk to one hub and to where it sends them. The first address is the hub's.

    Threads may share it. Through a proxy only addresses in URLs are looked at: it resolves names itself.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._hub: Nearness | None = None
        super().__init__()

    def check(self, host: str, address: str) -> None:
        """WeightsError for an address that is nearer than the hub's."""
        found = nearness(address)
        with self._lock:
            if self._hub is None:
                self._hub = found
            if found <= self._hub:
                return
            hub = self._hub
        raise WeightsError(
            f"{self._source}: the hub sends its client to {host} at {address}, a {found.name.lower()} address, while "
            f"its own is {hub.name.lower()}: nothing nearer than the hub is asked; name a hub (HF_ENDPOINT) that has "
            "the files itself, or copy the model here and name its directory"
        )

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        """As in HTTPAdapter, with connections that are looked at."""
        super().init_poolmanager(*arguments, **options)
        adapter = self

        class Plain(HTTPConnection):
            def _new_conn(self) -> socket.socket:
                return _checked(adapter, self.host, super()._new_conn())

        class Encrypted(HTTPSConnection):
            def _new_conn(self) -> socket.socket:
                return _checked(adapter, self.host, super()._new_conn())

        class Pool(HTTPConnectionPool):
            ConnectionCls = Plain

        class EncryptedPool(HTTPSConnectionPool):
            ConnectionCls = Encrypted

        self.poolmanager.pool_classes_by_scheme = {"http": Pool, "https": EncryptedPool}

    def send(self, request: PreparedRequest, *arguments: Any, **options: Any) -> Response:
        """As in HTTPAdapter. Raises WeightsError as `check` does."""
        host = urlsplit(request.url or "").hostname or ""
        try:
            nearness(host)
        except ValueError:
            pass  # a name
        else:
            self.check(host, host)
        response = super().send(request, *arguments, **options)
        with self._lock:
            if self._hub is None:  # a proxy's connection is not the hub's
                self._hub = Nearness.PUBLIC
        return response


def _checked(adapter: NoNearer, host: str, connection: socket.socket) -> socket.socket:
    try:
        adapter.check(host, str(connection.getpeername()[0]))
    except BaseException:
        connection.close()
        raise
    return connection
