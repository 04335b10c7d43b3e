"""`KvHandoff` for the engine loop: joins the pure legs to one transport.

Calls from the engine, completions from transport threads and answers from peers all become events in one queue.
Whichever thread finds the queue idle applies events until it is empty; no lock is held while the transport or the
engine is called, and the events of an attempt are applied, and its results reported, in one order.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..config import TransferConfig
from ..errors import ConfigError
from ..interfaces.handoff import (
    BlockRef,
    Failed,
    HandoffEvent,
    HandoffStats,
    PromptResult,
    Received,
    ReceiveJob,
    SendJob,
    Sent,
)
from ..interfaces.transport import CLOSE_S, KvRegion, Piece, TransferResult
from ..kv.keys import keys_digest
from ..protocol import CommitCall, PrefillRecord, Ticket
from ..threads import running_pool
from . import leg as lg
from .backend import TransferBackend
from .bounded import TookTooLong, run_bounded
from .places import Place, block_at, gaps, place
from .record import Expected, mismatch, pack_record, unpack_record

_log = logging.getLogger(__name__)

_CLOSED_KEPT = 65536
"""Ended attempts remembered, so that a late message cannot bring one back."""


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """What one attempt needs beside its leg."""

    leg: lg.Leg
    ticket: Ticket
    job: SendJob | ReceiveJob
    targets: dict[Place, int] = field(default_factory=dict)
    """Sending: the receiver's blocks, where the transport writes into them."""
    blocks: dict[Place, BlockRef] = field(default_factory=dict)
    """Sending: what was given so far."""
    result: PromptResult | None = None
    """Sending: set when every block was given."""
    record: PrefillRecord | None = None
    """Receiving: what came."""
    raw_record: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Resume:
    """Goes on with an attempt's work after something that was done on another thread."""

    attempt: str
    work: Callable[[_Attempt], None]


def block_crc32(region: KvRegion, block: int, crc: int) -> int:
    """`crc`, of the blocks before it, with the payload bytes of one more block in host memory (CRC-32)."""
    view = (ctypes.c_char * region.block_bytes).from_address(region.base + block * region.block_stride)
    return zlib.crc32(view, crc)


class TransferAgent:
    """Owns the legs of this process and its one back end; see `interfaces.handoff.KvHandoff` for the calls.

    Records are made here: `key_digest`, `block_bytes` and (with `verify_crc`, where the back end does not seal each
    block) `crc` describe the blocks that were really moved, prompt blocks `skip_blocks` onwards.
    """

    def __init__(
        self,
        backend: TransferBackend,
        region: KvRegion,
        cfg: TransferConfig,
        notify: Callable[[HandoffEvent], None],
        clock: Callable[[], float],
        *,
        epoch: str = "",
        vocab_size: int = 0,
    ) -> None:
        """`epoch`: of this process, as peers know it from `/info`. `vocab_size`: a record with other ids is refused; 0:
        unknown."""
        with_crc = cfg.verify_crc and not backend.seals_blocks
        if with_crc and region.device != "cpu":
            raise ConfigError(
                f"--transfer-crc reads KV in host memory, but the pool is on {region.device!r}; leave it out"
            )
        self._backend = backend
        self._region = region
        self._cfg = cfg
        self._notify = notify
        self._clock = clock
        self._epoch = epoch
        self._vocab_size = vocab_size
        self._mutex = threading.Lock()
        self._inbox: deque[tuple[lg.Event | _Resume, float]] = deque()
        self._pumping = False
        self._attempts: dict[str, _Attempt] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._counts = {"sent": 0, "received": 0, "failed": 0, "dropped": 0, "sent_bytes": 0}
        self._checksums = running_pool(1, "transfer-crc") if with_crc else None
        self._closing = threading.Event()

    # ------------------------------------------------------------------------------------------------ engine's calls

    def open_send(self, job: SendJob, now: float) -> None:
        ticket, mine = job.ticket, self._region.layout_digest
        problem = ""
        if ticket.layout_digest != mine:
            problem = (
                f"KV layouts differ: decode has {ticket.layout_digest}, this prefill has {mine}; "
                "run both with the same model, dtype, block size and layout"
            )
        elif ticket.peer_epoch and self._epoch and ticket.peer_epoch != self._epoch:
            problem = f"decode reserved for prefill process {ticket.peer_epoch}; restarted since, this is {self._epoch}"
        elif ticket.attempt != job.attempt:
            problem = f"ticket is of attempt {ticket.attempt}, the call of attempt {job.attempt}"
        leg = self._new_leg(job.attempt, lg.Side.SEND, job.deadline_s)
        with self._mutex:
            if job.attempt in self._attempts:
                self._counts["dropped"] += 1
                return
            if job.attempt in self._closed:
                problem = "the attempt was ended before its prefill began"
            self._attempts[job.attempt] = _Attempt(leg=leg, ticket=ticket, job=job, targets=block_at(ticket))
        if not problem:
            self._backend.expect(ticket)
        self._post(lg.Admit(job.attempt, problem), now)

    def send_blocks(self, attempt: str, blocks: Sequence[BlockRef], now: float) -> None:
        entry = self._open_for_blocks(attempt)
        if entry is None:
            return
        ticket, theirs = entry.ticket, entry.targets
        pieces: list[tuple[Place, Piece]] = []
        for block in blocks:
            at = place(block)
            if block.index < ticket.skip_blocks:
                continue
            if theirs and at not in theirs:
                reason = (
                    f"prompt block {block.index} of KV group {block.group} has no place: decode reserved "
                    f"{len(theirs)} after skipping {ticket.skip_blocks}"
                )
                self._post(lg.Cancel(attempt, reason), now)
                return
            address = ticket.pool_base + theirs[at] * ticket.block_stride if theirs else 0
            piece = Piece(
                block_id=block.block_id, key=block.key, nbytes=self._region.block_bytes, remote_address=address
            )
            pieces.append((at, piece))
            entry.blocks.setdefault(at, block)
        if pieces:
            self._post(lg.Blocks(attempt, tuple(pieces)), now)

    def finish_send(self, attempt: str, result: PromptResult, now: float) -> None:
        entry = self._open_for_blocks(attempt)
        if entry is None:
            return
        missing = sorted(entry.targets.keys() - entry.blocks.keys()) or gaps(entry.blocks)
        if missing:
            group, index = missing[0]
            reason = (
                f"{len(entry.blocks)} blocks were given, {len(missing)} are missing, the first of them prompt block "
                f"{index} of KV group {group}; all or none are sent"
            )
            self._post(lg.Cancel(attempt, reason), now)
            return
        entry.result = result
        self._post(lg.Finish(attempt), now)

    def open_receive(self, job: ReceiveJob, now: float) -> Ticket:
        """As in `KvHandoff`. Raises Overloaded when the transport has no record slot left."""
        ticket = self._backend.reserve(job, self._region.layout_digest)
        ticket = ticket.model_copy(update={"peer_epoch": job.peer_epoch})
        leg = self._new_leg(job.attempt, lg.Side.RECEIVE, job.deadline_s)
        with self._mutex:
            assert job.attempt not in self._attempts, f"attempt {job.attempt} was opened twice"
            self._attempts[job.attempt] = _Attempt(leg=leg, ticket=ticket, job=job)
        self._post(lg.Admit(job.attempt), now)
        return ticket

    def commit(self, call: CommitCall, now: float) -> None:
        if self._live(call.attempt) is not None:
            self._post(lg.Commit(call.attempt, call.ok, call.stage, call.reason), now)

    def cancel(self, attempt: str, reason: str, now: float) -> None:
        with self._mutex:
            known = attempt in self._attempts
            if not known:
                self._counts["dropped"] += 1
                self._remember(attempt)
        if known:
            self._post(lg.Cancel(attempt, reason, given_up=True), now)

    def tick(self, now: float) -> None:
        with self._mutex:
            due = [e.leg.attempt for e in self._attempts.values() if e.leg.timer_s <= now]
        for attempt in due:
            self._post(lg.Tick(attempt), now)

    def next_deadline(self) -> float | None:
        with self._mutex:
            due = min((e.leg.timer_s for e in self._attempts.values()), default=lg.NEVER)
        # A leg that another thread has just released has no timer and is not yet forgotten.
        return None if due == lg.NEVER else due

    def is_drained(self, attempt: str) -> bool:
        """As in `KvHandoff`. A peer that asks has given the attempt up: a live one is ended, an unknown one is
        remembered, so that a `open_send` that comes later is refused."""
        with self._mutex:
            entry = self._attempts.get(attempt)
            if entry is None:
                self._remember(attempt)
                return True
        if not entry.leg.closing:
            self._post(lg.Cancel(attempt, "decode gave the attempt up", given_up=True), self._clock())
        with self._mutex:
            return attempt not in self._attempts

    def stats(self) -> HandoffStats:
        """A snapshot of the counters."""
        with self._mutex:
            legs = [e.leg for e in self._attempts.values()]
            return HandoffStats(
                live=len(legs),
                quarantined=sum(leg.state is lg.LegState.QUARANTINED for leg in legs),
                sent=self._counts["sent"],
                received=self._counts["received"],
                failed=self._counts["failed"],
                dropped=self._counts["dropped"] + sum(leg.dropped for leg in legs),
                sent_bytes=self._counts["sent_bytes"],
            )

    def close(self, timeout_s: float = CLOSE_S) -> None:
        ends_at = time.monotonic() + timeout_s
        self._closing.set()
        self._backend.close(timeout_s)
        if self._checksums is not None:
            left = max(0.0, ends_at - time.monotonic())
            end = partial(self._checksums.shutdown, wait=True, cancel_futures=True)
            try:
                run_bounded(end, left, "transfer-close")
            except TookTooLong:
                _log.warning("a checksum has not ended within %g s", timeout_s)

    # -------------------------------------------------------------------------------------------------------- events

    def _new_leg(self, attempt: str, side: lg.Side, deadline_s: float) -> lg.Leg:
        return lg.new_leg(
            attempt,
            side,
            deadline_s=deadline_s,
            timeout_s=self._cfg.timeout_s,
            peer_writes=self._backend.peer_writes,
        )

    def _live(self, attempt: str) -> _Attempt | None:
        with self._mutex:
            entry = self._attempts.get(attempt)
            if entry is None or entry.leg.closing:
                self._counts["dropped"] += 1
                return None
            return entry

    def _open_for_blocks(self, attempt: str) -> _Attempt | None:
        entry = self._live(attempt)
        if entry is not None and entry.result is not None:
            with self._mutex:
                self._counts["dropped"] += 1
            return None
        return entry

    def _remember(self, attempt: str) -> None:
        self._closed[attempt] = None
        self._closed.move_to_end(attempt)
        while len(self._closed) > _CLOSED_KEPT:
            self._closed.popitem(last=False)

    def _post(self, event: lg.Event | _Resume, now: float) -> None:
        with self._mutex:
            self._inbox.append((event, now))
            if self._pumping:
                return
            self._pumping = True
        while True:
            with self._mutex:
                if not self._inbox:
                    self._pumping = False
                    return
                event, now = self._inbox.popleft()
                entry = self._attempts.get(event.attempt)
                if entry is None:
                    self._counts["dropped"] += 1
                    continue
                actions: tuple[lg.Action, ...] = ()
                if not isinstance(event, _Resume):
                    entry.leg, actions = lg.step(entry.leg, event, now)
            try:
                if isinstance(event, _Resume):
                    event.work(entry)
                for action in actions:
                    self._perform(entry, action)
            except BaseException:
                with self._mutex:
                    self._pumping = False
                raise

    def _perform(self, entry: _Attempt, action: lg.Action) -> None:
        attempt = entry.leg.attempt
        match action:
            case lg.Write(op=op, pieces=pieces):
                self._write(entry, op, [piece for _, piece in pieces], None)
            case lg.WriteRecord(op=op):
                moved = [entry.blocks[at].block_id for at in sorted(entry.blocks)]
                self._with_crc(entry, moved, lambda e, crc: self._write_record(e, op, crc))
            case lg.Read(op=op):
                assert isinstance(entry.job, ReceiveJob)
                size = self._region.block_bytes
                wanted = [Piece(block_id=b.block_id, key=b.key, nbytes=size) for b in entry.job.blocks]
                done = self._done(entry, op)
                self._start(done, lambda: self._backend.read(attempt, wanted, self._time_left(entry), done))
            case lg.Check():
                assert isinstance(entry.job, ReceiveJob)
                self._with_crc(entry, [b.block_id for b in entry.job.blocks], self._check)
            case lg.Stop():
                self._backend.cancel(attempt)
            case lg.Ask():
                job = entry.job
                url, epoch = (job.peer_url, job.peer_epoch) if isinstance(job, ReceiveJob) else ("", "")
                self._backend.drained(
                    attempt, url, epoch, lambda ok: self._post(lg.DrainAnswer(attempt, ok), self._clock())
                )
            case lg.Emit(event=event):
                self._emit(event)
            case lg.EmitReceived(seconds=seconds):
                assert entry.record is not None, f"attempt {attempt} was verified without a record"
                self._emit(Received(attempt=attempt, record=entry.record, seconds=seconds))
            case lg.Forget():
                with self._mutex:
                    del self._attempts[attempt]
                    self._counts["dropped"] += entry.leg.dropped
                    self._remember(attempt)
                self._backend.forget(attempt)

    def _with_crc(
        self, entry: _Attempt, block_ids: Sequence[int], work: Callable[[_Attempt, int | None], None]
    ) -> None:
        """Go on with the blocks' checksum, or with None where checksums are off.

        They take about a second per gigabyte: not on the engine's thread. The work comes back through the queue, so
        that nothing is started for an attempt that was ended meanwhile without the leg's knowledge.
        """
        if self._checksums is None:
            work(entry, None)
            return
        attempt = entry.leg.attempt

        def compute() -> None:
            crc = 0
            for block in block_ids:
                if self._closing.is_set():
                    return
                crc = block_crc32(self._region, block, crc)
            self._post(_Resume(attempt, lambda e: work(e, crc)), self._clock())

        self._checksums.submit(compute)

    def _start(self, done: Callable[[TransferResult], None], call: Callable[[], None]) -> None:
        """Hand an operation to the back end. One that could not be started may have started in part."""
        try:
            call()
        except Exception as error:
            done(TransferResult(ok=False, moved_bytes=0, reason=f"transport refused: {error!r}", settled=False))

    def _time_left(self, entry: _Attempt) -> float:
        # The leg's own timer fires first; the margin lets a transport tell a late end from none.
        return max(0.0, entry.leg.timer_s - self._clock()) + 0.1

    def _done(self, entry: _Attempt, op: int) -> Callable[[TransferResult], None]:
        attempt = entry.leg.attempt

        def done(result: TransferResult) -> None:
            if result.record is not None:
                entry.raw_record = result.record
            event = lg.OpDone(attempt, op, result.ok, result.settled, result.moved_bytes, result.reason)
            self._post(event, self._clock())

        return done

    def _write(self, entry: _Attempt, op: int, pieces: Sequence[Piece], record: bytes | None) -> None:
        leg, done = entry.leg, self._done(entry, op)
        left = self._time_left(entry)
        self._start(done, lambda: self._backend.write(leg.attempt, entry.ticket, pieces, record, left, done))

    def _write_record(self, entry: _Attempt, op: int, crc: int | None) -> None:
        if entry.leg.closing:
            self._done(entry, op)(TransferResult(ok=False, moved_bytes=0, reason="ended before the record"))
            return
        result = entry.result
        assert result is not None
        first = result.first_logprobs
        record = PrefillRecord(
            attempt=entry.leg.attempt,
            num_tokens=result.num_tokens,
            first_token=result.first_token,
            first_logprobs=None if first is None else (first.token_id, first.logprob, first.top),
            key_digest=keys_digest([entry.blocks[at].key for at in sorted(entry.blocks)]),
            block_bytes=self._region.block_bytes,
            crc=crc,
        )
        self._write(entry, op, (), pack_record(record))

    def _check(self, entry: _Attempt, crc: int | None) -> None:
        self._post(lg.Checked(entry.leg.attempt, self._problem(entry, crc)), self._clock())

    def _problem(self, entry: _Attempt, crc: int | None) -> str:
        job = entry.job
        assert isinstance(job, ReceiveJob)
        if entry.raw_record is None:
            return "no record came with the blocks"
        try:
            record = unpack_record(entry.raw_record)
        except ValueError as error:
            return str(error)
        expected = Expected(
            attempt=job.attempt,
            num_tokens=job.num_tokens,
            keys=tuple(block.key for block in job.blocks),
            block_bytes=self._region.block_bytes,
            vocab_size=self._vocab_size,
        )
        problem = mismatch(record, expected)
        if not problem and crc is not None:
            if record.crc is None:
                problem = "record has no checksum; set --transfer-crc on prefill as well"
            elif record.crc != crc:
                problem = f"blocks have CRC-32 {crc:08x}, the record says {record.crc:08x}"
        entry.record = record
        return problem

    def _emit(self, event: HandoffEvent) -> None:
        with self._mutex:
            match event:
                case Sent(sent_bytes=sent_bytes):
                    self._counts["sent"] += 1
                    self._counts["sent_bytes"] += sent_bytes
                case Received():
                    self._counts["received"] += 1
                case Failed(given_up=given_up):
                    self._counts["failed"] += not given_up
        self._notify(event)
