"""A process signs the tickets it gives out, by a key that never leaves it, and knows them again. Pure.

What is signed is the attempt, the time by which it ends, and everything else the ticket says: whose epoch, which
blocks, at which addresses. The signature travels in the ticket's `greeting`, as `ADDRESS/WORD`: prefill says the word
at the address before it writes, with a digest of the ticket as it has it (docs/adr/0024).
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

from ..protocol.ticket import Ticket

MAX_CLAIM_BYTES = 512
"""Longer attempt ids than fit are refused by `sign`, not by the peer."""


def address_of(ticket: Ticket) -> str:
    """`host:port` of the process that reserved."""
    return ticket.greeting.partition("/")[0]


def claim(ticket: Ticket) -> bytes:
    """What prefill says, a line without its end: `DIGEST WORD ATTEMPT`."""
    word = ticket.greeting.partition("/")[2] or "-"
    return f"{_digest(ticket)} {word} {ticket.attempt}".encode()


def _digest(ticket: Ticket) -> str:
    plain = ticket.model_copy(update={"greeting": address_of(ticket)})
    return sha256(plain.model_dump_json().encode()).hexdigest()


class TicketSigner:
    """Signs tickets for one life of a process. Times are of its own clock, in seconds."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def sign(self, ticket: Ticket, expires: float) -> Ticket:
        """The ticket with its word."""
        assert ticket.greeting and "/" not in ticket.greeting, f"greeting {ticket.greeting!r} is no bare address"
        signed = f"{expires:.3f}-{self._mac(_digest(ticket), f'{expires:.3f}', ticket.attempt)}"
        ticket = ticket.model_copy(update={"greeting": f"{ticket.greeting}/{signed}"})
        assert len(claim(ticket)) < MAX_CLAIM_BYTES, f"attempt id of {len(ticket.attempt)} bytes"
        return ticket

    def attempt_of(self, said: bytes, now: float) -> str:
        """The attempt that a peer's claim is for. Raises ValueError saying what is wrong with it."""
        try:
            digest, word, attempt = said.decode().split(" ", 2)
            expires, _, mac = word.partition("-")
            until = float(expires)
        except ValueError as error:
            raise ValueError("no ticket of this process was shown") from error
        if not hmac.compare_digest(mac.encode(), self._mac(digest, expires, attempt).encode()):
            raise ValueError("the ticket is not as this process signed it")
        if now >= until:
            raise ValueError(f"the ticket expired {now - until:.1f} s ago")
        return attempt

    def _mac(self, *parts: str) -> str:
        return hmac.digest(self._key, "\n".join(parts).encode(), "sha256").hex()
