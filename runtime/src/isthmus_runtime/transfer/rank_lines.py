"""What the ranks of a tensor-parallel engine say to each other about KV that moves: one JSON line a message."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from ..protocol.ticket import RankPool
from .peers import Peer
from .transport import Run

TAKE_S = 2.0
"""A rank that takes no message within this is lost."""
What = Literal["expect", "write", "cancel", "forget", "moving", "hang up", "checksum", "close"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank writes of an operation."""

    attempt: str
    session: str
    """Of the rank's counterpart at the peer, whose greeter and epoch are those of its first rank."""
    greeting: str
    epoch: str
    claim: str
    mapping: str = ""
    """Over NVLink: the counterpart's offer of its pool."""
    base: int = 0
    """Where that pool is in its process."""
    runs: tuple[tuple[int, int, int], ...] = ()
    """Offset in this rank's pool, offset in the counterpart's, bytes."""
    timeout_s: float = 0.0

    @property
    def peer(self) -> Peer:
        """Who is asked before anything is written, and written to."""
        return Peer(self.session, self.greeting, self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """From the first rank."""

    number: int
    what: What
    attempt: str = ""
    part: Part | None = None
    host: str = ""
    blocks: tuple[int, ...] = ()
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To it; of each kind of question what it asks for."""

    number: int
    ok: bool = True
    moved: int = 0
    reason: str = ""
    settled: bool = True
    moving: bool = False
    crc: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A rank's first line: where its pool can be written, or why it moves nothing."""

    problem: str = ""
    session: str = ""
    base: int = 0
    mapping: str = ""
    transport: str = ""

    @property
    def pool(self) -> RankPool:
        """As tickets carry it."""
        return RankPool(session=self.session, pool_base=self.base, mapping=self.mapping)


ASK, ANSWER, TOLD = TypeAdapter(Ask), TypeAdapter(Answer), TypeAdapter(Told)


def channel() -> tuple[socket.socket, socket.socket]:
    """The first rank's end, and the other's, to be inherited by its process."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        # A wait for a rank that stands still has an end; a line that was written in part cannot be gone on with.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(TAKE_S), 0))
    return ours, theirs


def relative(runs: Sequence[Run], here: int, there: int) -> tuple[tuple[int, int, int], ...]:
    """Runs between pools at `here` and `there`, as a `Part` has them."""
    return tuple((run.source - here, run.target - there, run.nbytes) for run in runs)


def lines(end: socket.socket) -> Iterator[bytes]:
    """Whole lines, without their ends, until the other side closes."""
    rest = b""
    while part := end.recv(1 << 16):
        *whole, rest = (rest + part).split(b"\n")
        yield from whole
