"""What the head of a request says of it, beyond what the parser checks. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import InvalidRequest

_LINE = 200
"""Bytes that a line of a head takes, beside its own."""
_TOLD = 100
"""Bytes of a header that an error repeats."""


class UnknownCoding(InvalidRequest):
    """A body in a Transfer-Encoding that is not read (RFC 9112, 6.1)."""

    status = 501
    code = "unsupported_transfer_encoding"


class Head(NamedTuple):
    """The head of a request."""

    has_body: bool
    encoded: bool
    """The body comes in a Content-Encoding."""


def read_head(headers: Iterable[tuple[bytes, bytes]], *, version: str, upgrades: bool) -> Head:
    """Raises InvalidRequest, UnknownCoding (501). `upgrades`: it asks for another protocol."""
    hosts, has_body, encoded, codings = 0, False, False, list[bytes]()
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"content-encoding":
            encoded = True
        elif name == b"transfer-encoding":
            has_body = True
            codings.append(value)
        elif name == b"content-length" and value.strip(b" \t0"):
            has_body = True
    if hosts != 1 and version == "1.1":
        raise InvalidRequest("an HTTP/1.1 request must have exactly one Host header (RFC 9112, 3.2)")
    if has_body and upgrades:
        # The parser would take the body for another protocol, or for the next request.
        raise InvalidRequest(
            "a request with a body asks for an Upgrade, and this server speaks HTTP/1.1 alone; send it without the "
            "Upgrade header (Java's HttpClient: version(HTTP_1_1))"
        )
    if codings and b",".join(codings).strip().lower() != b"chunked":
        # The parser reads what ends in chunks, and would take what is packed within for the body itself.
        raise UnknownCoding(
            f"Transfer-Encoding: {b', '.join(codings)[:_TOLD].decode('latin-1')!r} is not read, chunked alone is; say "
            "how the body is packed as its Content-Encoding (gzip, deflate)"
        )
    return Head(has_body, encoded)


def size_of(headers: Iterable[tuple[bytes, bytes]], url: int) -> int:
    """Bytes that a head takes while it waits; `url`: of those, what its URL has."""
    return sum(len(name) + len(value) + _LINE for name, value in headers) + url
