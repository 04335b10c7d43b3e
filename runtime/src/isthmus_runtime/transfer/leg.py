"""One transfer leg as a pure state machine: no I/O, no clock, no threads. `step(leg, event, now)` is all of it.

| state | event | next | actions |
|---|---|---|---|
| NEW | Admit("") | RESERVED (by ADMITTED) | |
| RESERVED, COMPUTING (send) | Blocks | COMPUTING | Write(op, new pieces) |
| RESERVED, COMPUTING (send) | Finish | SENDING | WriteRecord if nothing is in flight |
| SENDING | last OpDone(ok) of the blocks | SENDING | WriteRecord |
| SENDING | OpDone(ok) of the record | RELEASED (by SENT, DONE) | Emit Sent, Forget, Emit Released |
| RESERVED (receive) | Commit(ok) | RECEIVING | Read |
| RECEIVING | OpDone(ok) | RECEIVING | Check |
| RECEIVING | Checked("") | RELEASED (by VERIFIED, RUNNING, DONE) | EmitReceived, Forget, Emit Released |
| any of the above | a problem, OpDone or Commit not ok, Cancel, deadline | CANCELLING | Emit Failed, Stop, Ask |
| CANCELLING | nothing can move any more | RELEASED (by DRAINED) | Forget, Emit Released |
| CANCELLING | RELEASE_BOUND_S passed | QUARANTINED | Emit Released(drained=False) |
| QUARANTINED | nothing can move any more | RELEASED (by DRAINED) | Forget, Emit Drained |

States in brackets are passed through within one step. "Nothing can move": every operation reported its end, and
where a peer writes into this side's memory it acknowledged the drain. Asks are repeated with backoff for as long as
it takes. Whatever is not in the table (late, repeated, of another attempt) is counted in `dropped` and changes
nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from ..interfaces.handoff import Drained, Failed, Released, Sent
from ..interfaces.transport import Piece
from .places import Place

RELEASE_BOUND_S = 0.5
"""From failure to `Released`: not drained by then means quarantine."""
ASK_LIMIT_S = 1.0
"""An ask without an answer for this long counts as unanswered."""
ASK_BACKOFF_S = 0.05
ASK_BACKOFF_MAX_S = 5.0
NEVER = float("inf")


class Side(StrEnum):
    """Which end of the transfer."""

    SEND = "send"
    RECEIVE = "receive"


class LegState(StrEnum):
    """Where a leg stands; its value is the `stage` of a failure."""

    NEW = "new"
    ADMITTED = "admitted"
    RESERVED = "reserved"
    COMPUTING = "computing"
    SENDING = "sending"
    SENT = "sent"
    RECEIVING = "receiving"
    VERIFIED = "verified"
    RUNNING = "running"
    DONE = "done"
    CANCELLING = "cancelling"
    DRAINED = "drained"
    QUARANTINED = "quarantined"
    RELEASED = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Immutable state of one attempt on one side. Made by `new_leg`, changed by `step`."""

    attempt: str
    side: Side
    deadline_s: float
    """The whole attempt must end by then."""
    timeout_s: float
    """Longest time from `Finish` or `Commit` to the result."""
    state: LegState = LegState.NEW
    timer_s: float = NEVER
    """When `Tick` is due."""
    next_op: int = 0
    in_flight: frozenset[int] = frozenset()
    unsettled: frozenset[int] = frozenset()
    """Operations that reported failure while bytes may still move."""
    given: frozenset[Place] = frozenset()
    """Blocks handed over so far."""
    record_op: int | None = None
    checking: bool = False
    peer_clear: bool = True
    """False while the peer may still write here: from the start, for a ticket may be out before the first event."""
    moved_bytes: int = 0
    started_s: float = 0.0
    """When `Finish` or `Commit` came: what follows was not hidden behind compute."""
    release_by_s: float = NEVER
    asking: bool = False
    ask_at_s: float = 0.0
    asks: int = 0
    dropped: int = 0

    @property
    def closing(self) -> bool:
        """The result is out and only the release is left."""
        return self.state in (LegState.CANCELLING, LegState.QUARANTINED)

    @property
    def quiet(self) -> bool:
        """No byte of the attempt can move on account of this side's operations or its peer's."""
        return not self.in_flight and not self.unsettled and self.peer_clear


# ----------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Admit:
    """The attempt passed (or, with a problem, failed) the checks made before any byte moves."""

    attempt: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks that are final, with their places."""

    attempt: str
    pieces: tuple[tuple[Place, Piece], ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """All blocks were given."""

    attempt: str


@dataclass(frozen=True, slots=True)
class OpDone:
    """A write or read ended. `settled` False: its bytes may still move."""

    attempt: str
    op: int
    ok: bool
    settled: bool = True
    moved_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Commit:
    """The router's word about the prefill leg."""

    attempt: str
    ok: bool
    stage: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """The record was compared with what decode expects; a problem names the difference."""

    attempt: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the attempt, whatever it is doing."""

    attempt: str
    reason: str
    given_up: bool = False
    """Nothing went wrong: the request has ended, here or at the peer."""


@dataclass(frozen=True, slots=True)
class DrainAnswer:
    """Answer to `Ask`. True is final: a closed attempt never starts to move again."""

    attempt: str
    drained: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    attempt: str


Event = Admit | Blocks | Finish | OpDone | Commit | Checked | Cancel | DrainAnswer | Tick


# ---------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Write:
    """Start moving pieces; answer with OpDone(op)."""

    op: int
    pieces: tuple[tuple[Place, Piece], ...]


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Every block has arrived: write the record; answer with OpDone(op)."""

    op: int


@dataclass(frozen=True, slots=True)
class Read:
    """Fetch the record, and the blocks where the peer did not write them here; answer with OpDone(op)."""

    op: int


@dataclass(frozen=True, slots=True)
class Check:
    """Compare the record with what is expected; answer with Checked."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Start no further byte of the attempt."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Find out whether a byte of the attempt may still move; answer with DrainAnswer."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Tell the engine."""

    event: Sent | Failed | Released | Drained


@dataclass(frozen=True, slots=True)
class EmitReceived:
    """Tell the engine that the blocks are there, with the record that was checked."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Forget:
    """The attempt owns nothing any more: free its record slot, remove its keys."""


Action = Write | WriteRecord | Read | Check | Stop | Ask | Emit | EmitReceived | Forget
Step = tuple[Leg, tuple[Action, ...]]


def new_leg(attempt: str, side: Side, *, deadline_s: float, timeout_s: float, peer_writes: bool) -> Leg:
    """A leg in NEW. `peer_writes`: the sender writes into the receiver's memory; no matter to the sending side."""
    return Leg(
        attempt=attempt,
        side=side,
        deadline_s=deadline_s,
        timeout_s=timeout_s,
        peer_clear=not (peer_writes and side is Side.RECEIVE),
        timer_s=deadline_s,
    )


def step(leg: Leg, event: Event, now: float) -> Step:
    """Apply one event. The result depends on the arguments alone."""
    if event.attempt != leg.attempt or leg.state is LegState.RELEASED:
        return _drop(leg)
    if leg.closing:
        return _step_closing(leg, event, now)
    match event:
        case Tick():
            if now < leg.timer_s:
                return leg, ()
            return _fail(leg, "", f"deadline passed in state {leg.state}", now)
        case Cancel(reason=reason, given_up=given_up):
            return _fail(leg, "", reason, now, given_up=given_up)
        case Admit(problem=problem) if leg.state is LegState.NEW:
            if problem:
                return _fail(leg, "", problem, now)
            return replace(leg, state=LegState.RESERVED), ()
        case OpDone():
            return _op_done(leg, event, now)
        case Blocks() | Finish() if leg.side is Side.SEND and leg.state in (LegState.RESERVED, LegState.COMPUTING):
            return _blocks(leg, event) if isinstance(event, Blocks) else _finish(leg, now)
        case Commit() if leg.side is Side.RECEIVE and leg.state is LegState.RESERVED:
            return _commit(leg, event, now)
        case Checked(problem=problem) if leg.checking:
            if problem:
                return _fail(leg, "", problem, now)
            # The record is written after the blocks, so a verified record means the peer has nothing left to write.
            leg = replace(leg, checking=False, peer_clear=True)
            return _complete(leg, EmitReceived(now - leg.started_s))
        case _:
            return _drop(leg)


def _drop(leg: Leg) -> Step:
    return replace(leg, dropped=leg.dropped + 1), ()


def _blocks(leg: Leg, event: Blocks) -> Step:
    fresh = {place: piece for place, piece in event.pieces if place not in leg.given}
    dropped = leg.dropped + len(event.pieces) - len(fresh)
    leg = replace(leg, state=LegState.COMPUTING, dropped=dropped)
    if not fresh:
        return leg, ()
    op = leg.next_op
    leg = replace(leg, next_op=op + 1, in_flight=leg.in_flight | {op}, given=leg.given | fresh.keys())
    return leg, (Write(op, tuple(fresh.items())),)


def _finish(leg: Leg, now: float) -> Step:
    leg = replace(leg, state=LegState.SENDING, started_s=now, timer_s=min(leg.deadline_s, now + leg.timeout_s))
    return (leg, ()) if leg.in_flight else _start_record(leg)


def _start_record(leg: Leg) -> Step:
    op = leg.next_op
    return replace(leg, next_op=op + 1, in_flight=leg.in_flight | {op}, record_op=op), (WriteRecord(op),)


def _commit(leg: Leg, event: Commit, now: float) -> Step:
    if not event.ok:
        return _fail(leg, event.stage or "prefill", event.reason or "prefill failed", now)
    op = leg.next_op
    leg = replace(
        leg,
        state=LegState.RECEIVING,
        started_s=now,
        timer_s=min(leg.deadline_s, now + leg.timeout_s),
        next_op=op + 1,
        in_flight=leg.in_flight | {op},
    )
    return leg, (Read(op),)


def _op_done(leg: Leg, event: OpDone, now: float) -> Step:
    if event.op not in leg.in_flight:
        return _drop(leg)
    leg = _account(leg, event)
    if not event.ok:
        return _fail(leg, "", event.reason or "transfer failed without a reason", now)
    if leg.side is Side.RECEIVE:
        return replace(leg, checking=True), (Check(),)
    if event.op == leg.record_op:
        sent = Sent(attempt=leg.attempt, sent_bytes=leg.moved_bytes, seconds=now - leg.started_s)
        return _complete(leg, Emit(sent))
    if leg.state is LegState.SENDING and not leg.in_flight:
        return _start_record(leg)
    return leg, ()


def _account(leg: Leg, event: OpDone) -> Leg:
    unsettled = leg.unsettled if event.settled else leg.unsettled | {event.op}
    moved = leg.moved_bytes + event.moved_bytes
    return replace(leg, in_flight=leg.in_flight - {event.op}, unsettled=unsettled, moved_bytes=moved)


def _complete(leg: Leg, result: Emit | EmitReceived) -> Step:
    released = Emit(Released(attempt=leg.attempt, drained=True))
    return replace(leg, state=LegState.RELEASED, timer_s=NEVER), (result, Forget(), released)


def _fail(leg: Leg, stage: str, reason: str, now: float, *, given_up: bool = False) -> Step:
    failed = Emit(Failed(attempt=leg.attempt, stage=stage or leg.state.value, reason=reason, given_up=given_up))
    leg = replace(
        leg, state=LegState.CANCELLING, release_by_s=now + RELEASE_BOUND_S, ask_at_s=now, checking=False, timer_s=now
    )
    leg, more = _settle(leg, now)
    return leg, (failed, Stop(), *more)


def _step_closing(leg: Leg, event: Event, now: float) -> Step:
    match event:
        case OpDone(op=op) if op in leg.in_flight:
            return _settle(_account(leg, event), now)
        case DrainAnswer(drained=True):
            # The back end vouches for the operations too, so a report that never comes is not waited for.
            return _settle(
                replace(leg, peer_clear=True, in_flight=frozenset(), unsettled=frozenset(), asking=False), now
            )
        case DrainAnswer() if leg.asking:
            pause = min(ASK_BACKOFF_S * 2 ** min(leg.asks, 16), ASK_BACKOFF_MAX_S)
            return _settle(replace(leg, asking=False, asks=leg.asks + 1, ask_at_s=now + pause), now)
        case Tick():
            return _settle(leg, now)
        case _:
            return _drop(leg)


def _settle(leg: Leg, now: float) -> Step:
    """Release, quarantine, or ask again; and set the next timer."""
    actions: list[Action] = []
    if leg.quiet:
        cancelling = leg.state is LegState.CANCELLING
        event = Released(attempt=leg.attempt, drained=True) if cancelling else Drained(attempt=leg.attempt)
        return replace(leg, state=LegState.RELEASED, timer_s=NEVER), (Forget(), Emit(event))
    if leg.asking and now >= leg.ask_at_s:
        leg = replace(leg, asking=False, asks=leg.asks + 1)
    if not leg.asking and now >= leg.ask_at_s:
        # While asking, ask_at_s is when the ask counts as lost.
        leg = replace(leg, asking=True, ask_at_s=now + ASK_LIMIT_S)
        actions.append(Ask())
    if leg.state is LegState.CANCELLING and now >= leg.release_by_s:
        leg = replace(leg, state=LegState.QUARANTINED, release_by_s=NEVER)
        actions.append(Emit(Released(attempt=leg.attempt, drained=False)))
    return replace(leg, timer_s=min(leg.ask_at_s, leg.release_by_s)), tuple(actions)
