"""Direct mode: prefill writes into the blocks that decode reserved, through Mooncake's TransferEngine.

Decode gives out signed tickets, and answers for them at a port of its own; prefill asks there before it writes
(`peers`), and one thread owns what it writes (`writes`). A drain is believed when this process moves nothing more and
the peer has acknowledged that it does not either, or is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue

from ..credentials import Credentials
from ..errors import ConfigError
from ..interfaces.handoff import ReceiveJob
from ..interfaces.transport import CLOSE_S, Done, KvRegion, Piece, TransferResult
from ..protocol.ticket import RankPool, Ticket
from .backend import Effective
from .bounded import TookTooLong, run_bounded
from .drain import Answer, host_of
from .greeting import Greeter
from .native_engine import NativeEngine, start_engine
from .other_ranks import Joined, OtherRank, ask_all
from .peer_memory import batches
from .peers import Peers, peer_of
from .places import reserved
from .rank_lines import Answer as RankAnswer
from .rank_lines import Part, relative
from .sessions import Sessions
from .slots import SLOT_BYTES, RecordSlots
from .sockets import end_connections_from
from .tickets import TicketSigner, claim
from .transport import MAX_RUN_BYTES, Run, merge_runs
from .writes import Write, Writes

_log = logging.getLogger(__name__)

GRACE_S = 0.1
"""After a peer's drain acknowledgement: bytes already in this host's socket buffers reach memory meanwhile."""


class DirectTransfer:
    """Implements `TransferBackend` over TransferEngine with P2PHANDSHAKE.

    `host`: the address peers reach this at. `epoch`: of this process, never that of an earlier one.
    `credentials`: shown to peers that are asked for a drain. `others`: the other ranks of a tensor-parallel engine,
    whose pools have the same blocks: each moves its part of them.
    """

    def __init__(
        self,
        *,
        host: str,
        epoch: str,
        transport: str = "auto",
        fallback: str = "deny",
        timeout_s: float = 30.0,
        credentials: Credentials | None = None,
        others: Sequence[OtherRank] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert epoch, "a direct transfer needs the epoch of its process"
        self._host = host
        self._epoch = epoch
        self._transport, self._fallback = transport, fallback
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._slots = RecordSlots()
        self._reserved: dict[str, int] = {}
        """Address of the record's slot, per attempt that receives."""
        self._signer = TicketSigner()
        self._greeter: Greeter | None = None
        self._peers = Peers(clock, credentials)
        self._writes = Writes(self._peers, clock)
        self._others = tuple(others)
        self._pools: tuple[RankPool, ...] = ()
        """Of the other ranks."""
        self._native: NativeEngine | None = None
        """For new tickets."""
        self._sessions: Sessions | None = None
        self._region: KvRegion | None = None

    @property
    def peer_writes(self) -> bool:
        return True

    @property
    def seals_blocks(self) -> bool:
        return False

    def effective(self) -> Effective:
        if self._native is None:
            return Effective("", 0.0)
        memory = self._native.memory
        return self._native.effective if memory is None else replace(self._native.effective, gbps=memory.gbps)

    def prepare(self, region: KvRegion, timeout_s: float) -> None:
        """See `KvTransfer`; also measures a loopback write of 8 MiB, but over NVLink: there each peer is measured."""
        start = partial(
            start_engine,
            self._host,
            region,
            self._slots,
            transport=self._transport,
            fallback=self._fallback,
            timeout_s=self._timeout_s,
            clock=self._clock,
        )
        try:
            native: NativeEngine = run_bounded(start, timeout_s, "transfer-prepare")
        except TookTooLong as error:
            raise ConfigError(
                f"--transfer-mode direct: TransferEngine on {self._host!r} was not ready within {timeout_s:g} s; "
                "check that --transfer-host is an address of this machine"
            ) from error
        self._native, self._region = native, region
        # Between GPUs a peer writes without the engine, and of other ranks each has one of its own.
        renew = None
        if native.effective.transport == "tcp" and not self._others:
            renew = partial(start, measured=native.effective)
        self._sessions = Sessions(native, renew, self._renewed, self._clock)
        self._pools = tuple(self._pool_of(other, native, timeout_s) for other in self._others)
        self._greeter = Greeter(self._host, self._epoch, self._claim_problem)
        self._writes.start(native.engine, native.memory)

    def _renewed(self, native: NativeEngine) -> None:
        self._native = native
        self._writes.go_on_with(native.engine)

    @staticmethod
    def _pool_of(other: OtherRank, native: NativeEngine, timeout_s: float) -> RankPool:
        told, own = other.prepared(timeout_s), native.effective.transport
        if told.transport != own:
            raise ConfigError(
                f"--transfer-transport auto: rank {other.rank} would move KV over {told.transport}, rank 0 over {own}; "
                "name the transport"
            )
        return told.pool

    # ------------------------------------------------------------------------------------------------------ receiving

    def reserve(self, job: ReceiveJob, layout_digest: str) -> Ticket:
        assert self._sessions is not None and self._region is not None and self._greeter is not None, "prepare first"
        with self._lock:
            address = self._slots.take()
            self._reserved[job.attempt] = address
        native = self._sessions.reserve(job.attempt)
        ticket = Ticket(
            mode="direct",
            attempt=job.attempt,
            layout_digest=layout_digest,
            skip_blocks=job.skip_blocks,
            peer_epoch=job.peer_epoch,
            session=native.session,
            greeting=self._greeter.address,
            epoch=self._epoch,
            pool_base=self._region.base,
            block_stride=self._region.block_stride,
            blocks=reserved(job.blocks),
            record_address=address,
            record_capacity=SLOT_BYTES,
            mapping="" if native.memory is None else native.memory.offer,
            ranks=self._pools,
        )
        return self._signer.sign(ticket, job.deadline_s)

    def _claim_problem(self, said: bytes) -> str:
        """Why nothing may be written for the ticket that a peer shows; empty when it may."""
        try:
            attempt = self._signer.attempt_of(said, self._clock())
        except ValueError as error:
            return str(error)
        with self._lock:
            return "" if attempt in self._reserved else f"attempt {attempt} is over"

    def read(self, attempt: str, pieces: Sequence[Piece], timeout_s: float, done: Done) -> None:
        """The peer wrote the blocks; what is left to fetch is the record in its slot."""

        def look() -> None:
            with self._lock:
                address = self._reserved.get(attempt)
                raw = b"" if address is None else self._slots.read(address)
            ok = address is not None
            done(TransferResult(ok=ok, moved_bytes=0, record=raw, reason="" if ok else "no record slot is reserved"))

        self._writes.call(look)

    # -------------------------------------------------------------------------------------------------------- sending

    def expect(self, ticket: Ticket) -> None:
        self._peers.expect(ticket.attempt)
        self._peers.greet(peer_of(ticket), claim(ticket), ticket.attempt)
        for other, pool in zip(self._others, ticket.ranks, strict=False):
            other.expect(_part(ticket, pool))

    def write(
        self,
        attempt: str,
        ticket: Ticket,
        pieces: Sequence[Piece],
        record: bytes | None,
        timeout_s: float,
        done: Done,
    ) -> None:
        assert self._region is not None, "prepare first"
        if record is not None and len(record) > min(ticket.record_capacity, SLOT_BYTES):
            raise ValueError(f"record of {len(record)} bytes; decode has room for {ticket.record_capacity}")
        transport = self.effective().transport
        if bool(ticket.mapping) != (transport == "nvlink"):
            raise ValueError(
                f"decode {'takes' if ticket.mapping else 'does not take'} KV over NVLink, and this prefill sends it "
                f"over {transport}; give both the same --transfer-transport"
            )
        if len(ticket.ranks) != len(self._others):
            raise ValueError(
                f"decode has {1 + len(ticket.ranks)} ranks, this prefill {1 + len(self._others)}; give both the same "
                "--tensor-parallel-size"
            )
        runs = merge_runs(pieces, self._region, MAX_RUN_BYTES[transport])
        others = self._others if runs else ()
        joined = Joined(1 + len(others), done)
        slot = None if record is None else self._stage(record)
        op = Write(
            attempt=attempt,
            peer=peer_of(ticket),
            claim=claim(ticket),
            runs=deque(batches(runs) if ticket.mapping else runs),
            mapping=ticket.mapping,
            base=ticket.pool_base,
            record=None if slot is None or record is None else Run(slot, ticket.record_address, len(record)),
            done=joined.ended,
            over=partial(self._give, slot),
            timeout_s=timeout_s,
            deadline=self._clock() + timeout_s,
        )
        self._writes.submit(op)
        moved = relative(runs, self._region.base, ticket.pool_base) if others else ()
        for other, pool in zip(others, ticket.ranks, strict=False):  # none writes a record
            other.write(_part(ticket, pool, moved, timeout_s), joined.ended)

    def _stage(self, record: bytes) -> int:
        with self._lock:
            slot = self._slots.take()
            self._slots.write(slot, record)
        return slot

    def _give(self, slot: int | None) -> None:
        if slot is not None:
            with self._lock:
                self._slots.give(slot)

    # ---------------------------------------------------------------------------------------------------------- ending

    def fetch(self, attempt: str, pieces: Sequence[Piece], timeout_s: float, done: Done) -> None:
        done(TransferResult(ok=True, moved_bytes=0))

    def cancel(self, attempt: str) -> None:
        self._writes.cancel(attempt)
        for other in self._others:
            other.cancel(attempt)

    def drained(self, attempt: str, peer_url: str, peer_epoch: str, done: Callable[[bool], None]) -> None:
        def look() -> None:
            if self._writes.moving(attempt):
                done(False)
            else:
                ask_all(self._others, lambda other, then: other.moving(attempt, then), looked)

        def looked(ranks: Sequence[RankAnswer]) -> None:
            moving = any(rank.moving for rank in ranks)
            if moving or not peer_url:
                done(not moving)
            else:
                self._peers.ask_drain(peer_url, peer_epoch, attempt, answered)

        def answered(answer: Answer) -> None:
            host, sessions = host_of(peer_url), self._sessions
            if sessions is None:
                hung_up(())  # nobody was given an address to write to
            elif answer is Answer.GONE and host != self._host:
                end_connections_from(host, sessions.ports_of(attempt))
                ask_all(self._others, lambda other, then: other.hang_up(host, then), hung_up)
            elif answer or sessions.shut(attempt):
                hung_up(())
            else:
                done(False)

        def hung_up(ranks: Sequence[RankAnswer]) -> None:
            if all(rank.ok for rank in ranks):
                self._writes.call(partial(done, True), GRACE_S)
            else:
                done(False)

        self._writes.call(look)

    def forget(self, attempt: str) -> None:
        self._writes.forget(attempt)
        self._peers.forget(attempt)
        for other in self._others:
            other.forget(attempt)
        if self._sessions is not None:
            self._sessions.forget(attempt)
        with self._lock:
            address = self._reserved.pop(attempt, None)
            if address is not None:
                self._slots.give(address)

    def _end_threads(self) -> None:
        self._peers.close()
        if self._sessions is not None:
            self._sessions.close()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        ends_at = time.monotonic() + timeout_s
        told: SimpleQueue[Sequence[RankAnswer]] = SimpleQueue()
        ask_all(self._others, lambda other, then: other.close(timeout_s, then), told.put)
        ended = self._writes.close(timeout_s)
        try:
            run_bounded(self._end_threads, max(0.0, ends_at - time.monotonic()), "transfer-close")
        except TookTooLong:
            ended = False
        if self._greeter is not None:
            self._greeter.close()
        try:
            quiet = all(rank.ok for rank in told.get(timeout=max(0.0, ends_at - time.monotonic())))
        except Empty:
            quiet = False
        if not quiet:
            _log.warning("other ranks have not said within %g s that nothing of their KV moves", timeout_s)
        for other in self._others:
            other.leave()
        if not ended:
            _log.warning("transfers have not ended within %g s; their memory stays registered", timeout_s)
        elif self._native is not None and self._region is not None:
            self._native.release(self._region.base, self._slots.base)
            self._native = None


def _part(ticket: Ticket, pool: RankPool, runs: tuple[tuple[int, int, int], ...] = (), timeout_s: float = 0.0) -> Part:
    """What the rank writes whose counterpart has that pool."""
    peer = peer_of(ticket)
    return Part(
        attempt=ticket.attempt,
        session=pool.session,
        greeting=peer.greeting,
        epoch=peer.epoch,
        claim=claim(ticket).decode(),
        mapping=pool.mapping,
        base=pool.pool_base,
        runs=runs,
        timeout_s=timeout_s,
    )
