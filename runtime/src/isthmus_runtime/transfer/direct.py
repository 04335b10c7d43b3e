"""Direct mode: prefill writes into the blocks that decode reserved, through Mooncake's TransferEngine.

One thread owns every transfer in flight. It submits each run of adjacent blocks as a transfer of its own and reads
its status until that is final: a batch call would report the first failure while the rest of the batch still moves,
and would free a batch that timed out. So an operation that ends here has truly ended, and one that does not end in
time is reported as unsettled and watched until it does. Mooncake offers no completion event and its own waits spin
on a core; the thread looks every POLL_S while something moves and sleeps on an event otherwise.

Nothing is submitted to a decode that was not asked for its epoch a moment ago: a process that was restarted may have
its predecessor's port and addresses (docs/adr/0012).

A write is complete when the receiver has stored it (acknowledged framing, MC_TCP_PROTO 2), so the record, submitted
after everything else completed, is really last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..config import apply_native_environment
from ..credentials import Credentials
from ..errors import ConfigError
from ..interfaces.handoff import ReceiveJob
from ..interfaces.transport import CLOSE_S, Done, KvRegion, Piece, TransferResult
from ..protocol import Ticket
from ..threads import running_pool
from .backend import Effective
from .bounded import INSTALL_HINT, TookTooLong, built_for_cpus, run_bounded, split_address
from .drain import ASK_TIMEOUT_S, Answer, ask_peer
from .greeting import NO_ANSWER, Greeter, greeting_problem
from .handshakes import Handshakes, started
from .places import reserved
from .silence import Silence
from .slots import SLOT_BYTES, RecordSlots
from .sockets import end_connections_from, listening_ports, probe_accepted, stuck_bytes_to
from .tickets import TicketSigner, address_of, claim
from .transport import FLOOR_GBPS, MAX_RUN_BYTES, Run, check_memory, choose_transport, merge_runs, transport_environment

_log = logging.getLogger(__name__)

POLL_S = 0.0005
WINDOW = 64
"""Runs in flight per operation: what a cancelled operation still has to wait for."""
GREETING_S = 0.8
"""A peer that does not say its epoch within this is down."""
SILENT_S = 0.25
"""A peer that let its time pass, here or when it was asked for a drain, is left alone for this long, and then asked by
one at a time until it answers: all of its attempts would keep those of well peers waiting."""
FRESH_S = 0.25
"""A peer that said its epoch this recently is not asked again: no process is replaced, its memory registered and its
port taken, within this."""
GRACE_S = 0.1
"""After a peer's drain acknowledgement: bytes already in this host's socket buffers reach memory meanwhile."""
PROBE_BYTES = 8 << 20
PROBE_PARTS = 8
PROBE_S = 4.0
IDLE_POLL_S = 0.01
"""Pace of looking at transfers that have not moved for BUSY_S."""
BUSY_S = 0.1
_DONE, _FAILED = 1, -1


class _Peer(NamedTuple):
    """session: TransferEngine's `host:port`; greeting: where the process of `epoch` answers."""

    session: str
    greeting: str
    epoch: str


def _peer(ticket: Ticket) -> _Peer:
    return _Peer(ticket.session, address_of(ticket), ticket.epoch)


@dataclass(slots=True, kw_only=True, eq=False)
class _Op:
    attempt: str
    peer: _Peer
    claim: bytes
    runs: deque[Run]
    record: tuple[int, int] | None
    """(slot here, bytes) still to be written once all runs are done."""
    record_target: int
    done: Done
    timeout_s: float
    deadline: float
    asking: bool = False
    """Whether the peer is being asked for its epoch."""
    flying: dict[int, Run] = field(default_factory=dict)
    moved: int = 0
    problem: str = ""
    reported: bool = False
    broken: bool = False
    """A write of it failed: its bytes may be in the kernel's buffers."""
    slot: int | None = None


class DirectTransfer:
    """Implements `TransferBackend` over TransferEngine with P2PHANDSHAKE.

    `host`: the address peers reach this at. `epoch`: of this process, never that of an earlier one.
    `credentials`: shown to peers that are asked for a drain.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert epoch, "a direct transfer needs the epoch of its process"
        self._host = host
        self._epoch = epoch
        self._asked = (transport, fallback)
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._clock = clock
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._new: list[_Op] = []
        self._ops: list[_Op] = []
        self._calls: list[Callable[[], None]] = []
        self._asking: set[str] = set()
        """Attempts whose peer is being asked for a drain, or is about to be: they may be a thousand, and each would
        ask again while it waits for its turn."""
        self._graces: deque[tuple[float, Callable[[], None]]] = deque()
        """When a drain that was acknowledged may be believed; in order."""
        self._slots = RecordSlots()
        self._reserved: dict[str, int] = {}
        self._greeted: dict[_Peer, float] = {}
        """When the process last said so."""
        self._shown: dict[str, bool] = {}
        """Of each attempt that writes, whether the peer knew its ticket."""
        self._silence = Silence(clock, SILENT_S, 2 * GREETING_S)
        self._signer = TicketSigner()
        self._greeter: Greeter | None = None
        self._broken: dict[str, str] = {}
        """Peer's host, per attempt that had a failed write."""
        self._ports: frozenset[int] = frozenset()
        self._handshakes = Handshakes(clock)
        self._helpers = running_pool(4, "transfer-peers")
        self._thread = threading.Thread(target=self._run, name="transfer-direct", daemon=True)
        self._engine: Any = None
        self._region: KvRegion | None = None
        self._session = ""
        self._moved_at = 0.0
        self._effective = Effective("", 0.0)

    @property
    def peer_writes(self) -> bool:
        return True

    @property
    def seals_blocks(self) -> bool:
        return False

    @property
    def session(self) -> str:
        """TransferEngine peer id of this process; valid after `prepare`."""
        return self._session

    def effective(self) -> Effective:
        return self._effective

    # ------------------------------------------------------------------------------------------------------- start-up

    def prepare(self, region: KvRegion, timeout_s: float) -> None:
        """As in `KvTransfer`; also measures a loopback write of 8 MiB."""
        try:
            run_bounded(lambda: self._prepare(region), timeout_s, "transfer-prepare")
        except TookTooLong as error:
            raise ConfigError(
                f"--transfer-mode direct: TransferEngine on {self._host!r} was not ready within {timeout_s:g} s; "
                "check that --transfer-host is an address of this machine"
            ) from error
        self._thread.start()

    def _prepare(self, region: KvRegion) -> None:
        check_memory("direct", region.device, built_for_cpus=built_for_cpus())
        rdma = sorted(p.name for p in Path("/sys/class/infiniband").glob("*"))
        try:
            import mooncake.engine as mooncake
        except ImportError as error:
            raise ConfigError(f"--transfer-mode direct: Mooncake cannot be loaded ({error}); {INSTALL_HINT}") from error
        transport, protocol = choose_transport(
            *self._asked,
            device=region.device,
            rdma_devices=rdma,
            nvlink_built=bool(getattr(mooncake, "SUPPORT_INTRA_NVLINK", False)),
        )
        apply_native_environment(transport_environment(transport, self._timeout_s))
        engine = mooncake.TransferEngine()
        code = engine.initialize(self._host, "P2PHANDSHAKE", protocol, ",".join(rdma) if transport == "rdma" else "")
        if code != 0:
            raise ConfigError(
                f"--transfer-transport {transport}: TransferEngine did not start on {self._host!r} (code {code}); "
                "--transfer-host must be an address of this machine"
            )
        self._ports = listening_ports()
        probe_accepted()
        self._greeter = Greeter(self._host, self._epoch, self._claim_problem)
        size = region.num_blocks * region.block_stride
        for name, base, nbytes in (("KV pool", region.base, size), ("records", self._slots.base, self._slots.nbytes)):
            code = engine.register_memory(base, nbytes)
            if code != 0:
                raise ConfigError(f"--transfer-transport {transport}: registering {name} ({nbytes} bytes) gave {code}")
        self._engine, self._region = engine, region
        self._session = f"{self._host}:{engine.get_rpc_port()}"
        gbps = self._probe(region, size)
        if gbps < FLOOR_GBPS.get(transport, 0.0):
            raise ConfigError(
                f"--transfer-transport {transport}: the probe moved {gbps} GB/s, not {FLOOR_GBPS[transport]} "
                "or more; something slower moved the bytes: fix the driver, or ask for tcp"
            )
        self._effective = Effective(transport, gbps)

    def _probe(self, region: KvRegion, size: int) -> float:
        """GB/s of a write within the still unused memory of this process, through its own session."""
        on_host = region.device == "cpu"
        nbytes = min(PROBE_BYTES, self._slots.nbytes if on_host else size // 2, size)
        target = self._slots.base if on_host else region.base + nbytes
        part = max(1, nbytes // PROBE_PARTS)
        best = 0.0
        for _ in range(2):  # the first one opens the connections
            began = self._clock()
            flying = [
                self._engine.transfer_submit_write(self._session, region.base + at, target + at, part)
                for at in range(0, nbytes - part + 1, part)
            ]
            count = len(flying)
            while flying:
                if not started(flying[0]):
                    raise ConfigError(f"a probe of {nbytes} bytes to this process's own {self._session} failed")
                status = self._engine.transfer_check_status(flying[0])
                if status == _DONE:
                    del flying[0]
                elif status == _FAILED or self._clock() - began > PROBE_S:
                    flying[0] = 0
                else:
                    self._closing.wait(POLL_S)
            best = max(best, count * part / (self._clock() - began) / 1e9)
        return round(best, 2)

    # -------------------------------------------------------------------------------------------------------- calls

    def reserve(self, job: ReceiveJob, layout_digest: str) -> Ticket:
        assert self._region is not None and self._greeter is not None, "prepare comes first"
        with self._wake:
            address = self._slots.take()
            self._reserved[job.attempt] = address
        ticket = Ticket(
            mode="direct",
            attempt=job.attempt,
            layout_digest=layout_digest,
            skip_blocks=job.skip_blocks,
            peer_epoch=job.peer_epoch,
            session=self._session,
            greeting=self._greeter.address,
            epoch=self._epoch,
            pool_base=self._region.base,
            block_stride=self._region.block_stride,
            blocks=reserved(job.blocks),
            record_address=address,
            record_capacity=SLOT_BYTES,
        )
        return self._signer.sign(ticket, job.deadline_s)

    def _claim_problem(self, said: bytes) -> str:
        """Why nothing may be written for the ticket that a peer shows; empty when it may."""
        try:
            attempt = self._signer.attempt_of(said, self._clock())
        except ValueError as error:
            return str(error)
        with self._wake:
            return "" if attempt in self._reserved else f"attempt {attempt} is over"

    def write(
        self,
        attempt: str,
        ticket: Ticket,
        pieces: Sequence[Piece],
        record: bytes | None,
        timeout_s: float,
        done: Done,
    ) -> None:
        assert self._region is not None, "prepare comes first"
        if record is not None and len(record) > min(ticket.record_capacity, SLOT_BYTES):
            raise ValueError(f"record of {len(record)} bytes; decode has room for {ticket.record_capacity}")
        op = _Op(
            attempt=attempt,
            peer=_peer(ticket),
            claim=claim(ticket),
            runs=deque(merge_runs(pieces, self._region, MAX_RUN_BYTES[self._effective.transport])),
            record=None,
            record_target=ticket.record_address,
            done=done,
            timeout_s=timeout_s,
            deadline=self._clock() + timeout_s,
        )
        with self._wake:
            if record is not None:
                op.slot = self._slots.take()
                self._slots.write(op.slot, record)
                op.record = (op.slot, len(record))
            self._shown.setdefault(attempt, False)
            self._new.append(op)
            self._wake.notify()

    def read(self, attempt: str, pieces: Sequence[Piece], timeout_s: float, done: Done) -> None:
        """The peer wrote the blocks; what is left to fetch is the record in its slot."""

        def look() -> None:
            with self._wake:
                address = self._reserved.get(attempt)
                raw = b"" if address is None else self._slots.read(address)
            ok = address is not None
            done(TransferResult(ok=ok, moved_bytes=0, record=raw, reason="" if ok else "no record slot is reserved"))

        self._call(look)

    def cancel(self, attempt: str) -> None:
        with self._wake:
            for op in (*self._ops, *self._new):
                if op.attempt == attempt:
                    _stop(op, "cancelled")
        self._call(_look_again)

    def drained(self, attempt: str, peer_url: str, peer_epoch: str, done: Callable[[bool], None]) -> None:
        def look() -> None:
            with self._wake:
                moving = any(op.attempt == attempt for op in (*self._ops, *self._new))
                host = self._broken.get(attempt)
            moving = moving or (host is not None and stuck_bytes_to(host))
            if moving or not peer_url:
                done(not moving)
            elif attempt not in self._asking:  # else the answer is still to come, to the same leg
                self._asking.add(attempt)
                self._helpers.submit(ask)

        def ask() -> None:
            try:
                answer = Answer.UNKNOWN
                if self._silence.lets_try(peer_url):
                    began = self._clock()
                    answer = ask_peer(peer_url, peer_epoch, attempt, self._credentials)
                    if not answer and self._clock() - began >= ASK_TIMEOUT_S:
                        self._silence.note(peer_url)
                    else:
                        self._silence.over(peer_url)
                host = urlsplit(peer_url if "//" in peer_url else f"//{peer_url}").hostname or ""
                if answer is Answer.GONE and host != self._host:
                    end_connections_from(host, self._ports)
            finally:
                self._asking.discard(attempt)
            if not answer:
                done(False)
                return
            with self._wake:
                self._graces.append((self._clock() + GRACE_S, partial(done, True)))
                self._wake.notify()

        self._call(look)

    def expect(self, ticket: Ticket) -> None:
        with self._wake:
            self._shown.setdefault(ticket.attempt, False)
        self._helpers.submit(self._greet, _peer(ticket), claim(ticket), ticket.attempt)

    def forget(self, attempt: str) -> None:
        with self._wake:
            self._broken.pop(attempt, None)
            self._shown.pop(attempt, None)
            address = self._reserved.pop(attempt, None)
            if address is not None:
                self._slots.give(address)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        self._closing.set()
        with self._wake:
            self._wake.notify()
        end = time.monotonic() + timeout_s
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        try:
            left = max(0.0, end - time.monotonic())
            run_bounded(self._end_helpers, left, "transfer-close")
        except TookTooLong:
            ended = False
        if self._greeter is not None:
            self._greeter.close()
        if not ended:
            _log.warning("transfers have not ended within %g s; their memory stays registered", timeout_s)
        elif self._engine is not None and self._region is not None:
            self._engine.unregister_memory(self._region.base)
            self._engine.unregister_memory(self._slots.base)
            self._engine = None

    def _end_helpers(self) -> None:
        self._helpers.shutdown(wait=True, cancel_futures=True)
        self._handshakes.close()

    def _call(self, work: Callable[[], None]) -> None:
        """Have the transfer thread call `work` and look at every operation. A notification alone would be lost while
        it is busy, and it might then sleep until the next deadline."""
        with self._wake:
            self._calls.append(work)
            self._wake.notify()

    def _may_write(self, op: _Op) -> bool:
        with self._wake:
            fresh = self._clock() - self._greeted.get(op.peer, float("-inf")) < FRESH_S
            return fresh and self._shown.get(op.attempt, False)

    def _greet(self, peer: _Peer, claimed: bytes, attempt: str) -> str:
        """Ask who is there, and whether it knows the ticket. A dead host, too, would hold up the transfer thread inside
        Mooncake's handshake."""
        asked = self._clock()
        if self._silence.lets_try(peer.greeting):
            problem = greeting_problem(peer.greeting, claimed, peer.epoch, GREETING_S)
            if problem.startswith(NO_ANSWER) and self._clock() - asked >= GREETING_S:
                self._silence.note(peer.greeting)
            else:
                self._silence.over(peer.greeting)
        else:
            problem = f"{NO_ANSWER}: it did not a moment ago"
        with self._wake:
            self._greeted = {p: t for p, t in self._greeted.items() if p != peer and asked - t < FRESH_S}
            if not problem:
                self._greeted[peer] = asked
                if attempt in self._shown:  # else it is over
                    self._shown[attempt] = True
        return f"decode's TransferEngine at {peer.session} {problem}" if problem else ""

    def _check_peer(self, op: _Op) -> None:
        problem = self._greet(op.peer, op.claim, op.attempt)

        def checked() -> None:
            with self._wake:
                if problem:
                    _stop(op, problem)
                op.asking = False

        self._call(checked)

    # ------------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._wake:
                if not (self._calls or self._new):
                    self._wake.wait(self._pause())
                calls, self._calls = self._calls, []
                while self._graces and self._graces[0][0] <= self._clock():
                    calls.append(self._graces.popleft()[1])
                self._ops.extend(self._new)
                self._new.clear()
            for call in calls:
                call()
            for op in tuple(self._ops):
                self._advance(op)

    def _pause(self) -> float | None:
        if any(op.flying for op in self._ops):
            return POLL_S if self._clock() - self._moved_at < BUSY_S else IDLE_POLL_S
        ends = [op.deadline for op in self._ops if not op.reported]
        due = min(ends + [at for at, _ in islice(self._graces, 1)], default=None)
        return None if due is None else max(0.0, due - self._clock())

    def _advance(self, op: _Op) -> None:
        for transfer, run in tuple(op.flying.items()):
            status = self._engine.transfer_check_status(transfer)
            if status == _DONE:
                op.moved += 0 if run.target == op.record_target else run.nbytes
                self._moved_at = self._clock()
                del op.flying[transfer]
            elif status == _FAILED:
                del op.flying[transfer]
                _stop(op, f"write of {run.nbytes} bytes to {op.peer.session} failed")
                op.broken = True
                with self._wake:
                    self._greeted.pop(op.peer, None)
        if not op.asking:
            self._submit(op)
        if not (op.asking or op.flying or op.runs or op.record):
            self._finish(op)
        elif not op.reported and self._clock() >= op.deadline:
            op.reported = True
            with self._wake:
                _stop(op, f"{op.peer.session} did not take the bytes within {op.timeout_s:.3g} s")
            still = bool(op.flying)
            op.done(TransferResult(ok=False, moved_bytes=op.moved, reason=op.problem, settled=not still))

    def _submit(self, op: _Op) -> None:
        while len(op.flying) < WINDOW:
            with self._wake:
                if (op.runs or op.record) and not self._may_write(op):
                    op.asking = True
                    self._helpers.submit(self._check_peer, op)
                    return
                if op.runs:
                    run = op.runs.popleft()
                elif op.record and not op.flying:
                    run, op.record = Run(op.record[0], op.record_target, op.record[1]), None
                else:
                    return
            session, problem = op.peer.session, ""
            write = partial(self._engine.transfer_submit_write, session, run.source, run.target, run.nbytes)
            try:
                transfer = self._handshakes.submit(session, write)
            except Exception as error:  # what one peer's ticket says ends its own transfer, and no other
                transfer, problem = 0, f"cannot be written to: {error!r}"
            if started(transfer):
                op.flying[transfer] = run
                self._moved_at = self._clock()
            else:
                silent = self._handshakes.silent(session)
                problem = problem or ("does not answer a handshake" if silent else "refused the handshake")
                with self._wake:
                    _stop(op, f"{session} {problem}")

    def _finish(self, op: _Op) -> None:
        host = split_address(op.peer.session)[0] if op.broken else ""
        with self._wake:
            self._ops.remove(op)
            if op.slot is not None:
                self._slots.give(op.slot)
            if host:
                self._broken[op.attempt] = host
        if not op.reported:
            settled = not host or not stuck_bytes_to(host)
            op.done(TransferResult(ok=not op.problem, moved_bytes=op.moved, reason=op.problem, settled=settled))


def _stop(op: _Op, problem: str) -> None:
    """Submit nothing more of the operation; what is in flight is watched until it ends."""
    op.runs.clear()
    op.record = None
    op.problem = op.problem or problem


def _look_again() -> None:
    """For `_call`: nothing more than that."""
