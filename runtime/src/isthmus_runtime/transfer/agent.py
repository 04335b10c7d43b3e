"""`KvHandoff` for the engine loop: joins the pure legs to one transport.

Calls from the engine, completions from transport threads and answers from peers all become events in one queue.
Whichever thread finds the queue idle applies events until it is empty; no lock is held while the transport or the
engine is called, and the events of an attempt are applied, and its results reported, in one order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config import TransferConfig
from ..interfaces.handoff import (
    BlockRef,
    Failed,
    Fetched,
    FetchJob,
    HandoffEvent,
    HandoffStats,
    PromptResult,
    Received,
    ReceiveJob,
    SendJob,
    Sent,
)
from ..interfaces.transport import CLOSE_S, KvRegion, Piece, TransferResult
from ..protocol.calls import CommitCall
from ..protocol.ticket import Ticket
from . import leg as lg
from .attempts import Ended, Fetching, Receiving, Sending, ticket_problem
from .backend import TransferBackend
from .checksums import AskRank, Checksums
from .record import pack_record

_Attempt = Sending | Receiving | Fetching


@dataclass(frozen=True, slots=True)
class _Resume:
    """Goes on with an attempt's work after something that was done on another thread."""

    attempt: str
    work: Callable[[], None]


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
        rank_checksums: Sequence[AskRank] = (),
    ) -> None:
        """`epoch`: of this process, as peers know it from `/info`. `vocab_size`: a record with other ids is refused; 0:
        unknown. `rank_checksums`: of the other ranks, which have parts of each block."""
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
        self._ended = Ended()
        self._counts = {"sent": 0, "received": 0, "failed": 0, "dropped": 0, "sent_bytes": 0}
        self._checksums: Checksums | None = None
        if cfg.verify_crc and not backend.seals_blocks:
            self._checksums = Checksums(region, rank_checksums)

    # ------------------------------------------------------------------------------------------------ engine's calls

    def open_send(self, job: SendJob, now: float) -> None:
        problem = ticket_problem(job, self._region.layout_digest, self._epoch)
        leg = self._new_leg(job.attempt, lg.Side.SEND, job.deadline_s)
        with self._mutex:
            if job.attempt in self._attempts:
                self._counts["dropped"] += 1
                return
            if job.attempt in self._ended:
                problem = "the attempt was ended before its prefill began"
            self._attempts[job.attempt] = Sending(leg, job.ticket)
        if not problem:
            self._backend.expect(job.ticket)
        self._post(lg.Admit(job.attempt, problem), now)

    def send_blocks(self, attempt: str, blocks: Sequence[BlockRef], now: float) -> None:
        entry = self._open_for_blocks(attempt)
        if entry is None:
            return
        pieces, problem = entry.give(blocks, self._region.block_bytes)
        if problem:
            self._post(lg.Cancel(attempt, problem), now)
        elif pieces:
            self._post(lg.Blocks(attempt, pieces), now)

    def finish_send(self, attempt: str, result: PromptResult, now: float) -> None:
        entry = self._open_for_blocks(attempt)
        if entry is None:
            return
        if gap := entry.gap():
            self._post(lg.Cancel(attempt, gap), now)
            return
        entry.result = result
        self._post(lg.Finish(attempt), now)

    def open_receive(self, job: ReceiveJob, now: float) -> Ticket:
        """See `KvHandoff`. Raises Overloaded when the transport has no record slot left."""
        ticket = self._backend.reserve(job, self._region.layout_digest)
        ticket = ticket.model_copy(update={"peer_epoch": job.peer_epoch})
        leg = self._new_leg(job.attempt, lg.Side.RECEIVE, job.deadline_s)
        with self._mutex:
            assert job.attempt not in self._attempts, f"attempt {job.attempt} was opened twice"
            self._attempts[job.attempt] = Receiving(leg, job)
        self._post(lg.Admit(job.attempt), now)
        return ticket

    def fetch(self, job: FetchJob, now: float) -> None:
        # As a prompt that is received, with nobody to wait for: its leg bounds the call, and knows when it has drained.
        leg = lg.new_leg(
            job.attempt, lg.Side.RECEIVE, deadline_s=job.deadline_s, timeout_s=self._cfg.timeout_s, peer_writes=False
        )
        with self._mutex:
            assert job.attempt not in self._attempts, f"{job.attempt} was opened twice"
            self._attempts[job.attempt] = Fetching(leg, job)
        self._post(lg.Admit(job.attempt), now)
        self._post(lg.Commit(job.attempt, True), now)

    def commit(self, call: CommitCall, now: float) -> None:
        if self._live(call.attempt) is not None:
            self._post(lg.Commit(call.attempt, call.ok, call.stage, call.reason), now)

    def cancel(self, attempt: str, reason: str, now: float) -> None:
        with self._mutex:
            known = attempt in self._attempts
            if not known:
                self._counts["dropped"] += 1
                self._ended.note(attempt)
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
        """See `KvHandoff`. A peer that asks has given the attempt up: a live one is ended, an unknown one is
        remembered, so that a `open_send` that comes later is refused."""
        with self._mutex:
            entry = self._attempts.get(attempt)
            if entry is None:
                self._ended.note(attempt)
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
        if self._checksums is not None:
            self._checksums.stop()
        self._backend.close(timeout_s)
        if self._checksums is not None:
            self._checksums.close(max(0.0, ends_at - time.monotonic()))

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

    def _open_for_blocks(self, attempt: str) -> Sending | None:
        entry = self._live(attempt)
        if entry is None:
            return None
        assert isinstance(entry, Sending), f"attempt {attempt} does not send"
        if entry.result is not None:
            with self._mutex:
                self._counts["dropped"] += 1
            return None
        return entry

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
                    event.work()
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
                assert isinstance(entry, Sending)
                self._write(entry, op, [piece for _, piece in pieces], None)
            case lg.WriteRecord(op=op):
                assert isinstance(entry, Sending)
                self._write_record(entry, op)
            case lg.Read(op=op) if isinstance(entry, Fetching):
                self._fetch(entry, op)
            case lg.Read(op=op):
                assert isinstance(entry, Receiving)
                self._read(entry, op)
            case lg.Check() if isinstance(entry, Fetching):
                self._post(lg.Checked(attempt), self._clock())  # the pool's values are each checked when they are read
            case lg.Check():
                assert isinstance(entry, Receiving)
                self._check(entry)
            case lg.Stop():
                self._backend.cancel(attempt)
            case lg.Ask():
                url, epoch = (entry.job.peer_url, entry.job.peer_epoch) if isinstance(entry, Receiving) else ("", "")
                self._backend.drained(
                    attempt, url, epoch, lambda ok: self._post(lg.DrainAnswer(attempt, ok), self._clock())
                )
            case lg.Emit(event=Failed(reason=reason, given_up=given_up)) if isinstance(entry, Fetching):
                self._emit(Fetched(attempt=attempt, blocks=0, problem=reason, given_up=given_up))
            case lg.Emit(event=event):
                self._emit(event)
            case lg.EmitReceived() if isinstance(entry, Fetching):
                self._emit(Fetched(attempt=attempt, blocks=entry.found_bytes // self._region.block_bytes))
            case lg.EmitReceived(seconds=seconds):
                assert isinstance(entry, Receiving)
                assert entry.record is not None, f"attempt {attempt} was verified without a record"
                self._emit(Received(attempt=attempt, record=entry.record, seconds=seconds))
            case lg.Forget():
                with self._mutex:
                    del self._attempts[attempt]
                    self._counts["dropped"] += entry.leg.dropped
                    if not isinstance(entry, Fetching):  # no peer will ask about it
                        self._ended.note(attempt)
                self._backend.forget(attempt)

    def _with_crc(self, attempt: str, blocks: Sequence[BlockRef], work: Callable[[int | None], None]) -> None:
        """Go on with the blocks' checksum, or with None where checksums are off.

        The work comes back through the queue, so that nothing is started for an attempt that was ended meanwhile
        without the leg's knowledge.
        """
        if self._checksums is None:
            work(None)
            return

        def then(crc: int) -> None:
            self._post(_Resume(attempt, lambda: work(crc)), self._clock())

        self._checksums.compute([block.block_id for block in blocks], then)

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
            event = lg.OpDone(attempt, op, result.ok, result.settled, result.moved_bytes, result.reason)
            self._post(event, self._clock())

        return done

    def _write(self, entry: Sending, op: int, pieces: Sequence[Piece], record: bytes | None) -> None:
        leg, done = entry.leg, self._done(entry, op)
        left = self._time_left(entry)
        self._start(done, lambda: self._backend.write(leg.attempt, entry.ticket, pieces, record, left, done))

    def _write_record(self, entry: Sending, op: int) -> None:
        def work(crc: int | None) -> None:
            if entry.leg.closing:
                self._done(entry, op)(TransferResult(ok=False, moved_bytes=0, reason="ended before the record"))
                return
            self._write(entry, op, (), pack_record(entry.record(self._region.block_bytes, crc)))

        self._with_crc(entry.leg.attempt, entry.moved(), work)

    def _read(self, entry: Receiving, op: int) -> None:
        wanted, left, told = entry.pieces(self._region.block_bytes), self._time_left(entry), self._done(entry, op)

        def done(result: TransferResult) -> None:
            entry.raw_record = result.record
            told(result)

        self._start(done, lambda: self._backend.read(entry.job.attempt, wanted, left, done))

    def _fetch(self, entry: Fetching, op: int) -> None:
        wanted, left, told = entry.pieces(self._region.block_bytes), self._time_left(entry), self._done(entry, op)

        def done(result: TransferResult) -> None:
            entry.found_bytes = result.moved_bytes
            told(result)

        self._start(done, lambda: self._backend.fetch(entry.job.attempt, wanted, left, done))

    def _check(self, entry: Receiving) -> None:
        attempt = entry.job.attempt

        def work(crc: int | None) -> None:
            problem = entry.check(self._region.block_bytes, self._vocab_size, crc)
            self._post(lg.Checked(attempt, problem), self._clock())

        self._with_crc(attempt, entry.job.blocks, work)

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
