"""The leg under any sequence of events: one result, one release, no release while a byte may move."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.interfaces.handoff import Drained, Failed, Released, Sent
from isthmus_runtime.interfaces.transport import Piece
from isthmus_runtime.transfer import leg as lg
from isthmus_runtime.transfer.places import Place

ATTEMPT = "a-1"
RESULTS = (Sent, lg.EmitReceived, Failed)


def piece(index: int) -> tuple[Place, Piece]:
    return (0, index), Piece(block_id=index + 1, key=f"k{index}", nbytes=64)


@dataclass
class World:
    """Knows what the leg cannot: which operations are really under way, and whether the peer still writes."""

    leg: lg.Leg
    now: float = 0.0
    running: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    peer_writing: bool = False
    asked: int = 0
    checks: int = 0
    emitted: list[Any] = field(default_factory=list)
    """Events; an `EmitReceived` as it is, for the agent adds the record."""
    stopped: bool = False
    forgotten: int = 0

    def send(self, event: lg.Event) -> tuple[lg.Action, ...]:
        self.leg, actions = lg.step(self.leg, event, self.now)
        for action in actions:
            self.take(action)
        return actions

    def take(self, action: lg.Action) -> None:
        match action:
            case lg.Write(op=op) | lg.WriteRecord(op=op) | lg.Read(op=op):
                assert not self.stopped, "an operation was started after Stop"
                assert op not in self.running | self.ended, "an operation id was used twice"
                if isinstance(action, lg.WriteRecord):
                    assert not self.running, "the record was written while blocks were in flight"
                self.running.add(op)
            case lg.Stop():
                self.stopped = True
            case lg.Ask():
                self.asked += 1
            case lg.Check():
                self.checks += 1
            case lg.Forget():
                self.forgotten += 1
                assert not self.running and not self.peer_writing
            case lg.EmitReceived():
                self.emitted.append(action)
                self.peer_writing = False
            case lg.Emit(event=event):
                self.emitted.append(event)
                assert event.attempt == ATTEMPT
                if (isinstance(event, Released) and event.drained) or isinstance(event, Drained):
                    assert not self.running, "released while an operation was under way"
                    assert not self.peer_writing, "released while the peer may write"

    def kinds(self) -> list[type]:
        return [type(e) for e in self.emitted]

    def check_order(self) -> None:
        kinds = self.kinds()
        results = [k for k in kinds if k in RESULTS]
        assert len(results) <= 1
        assert kinds.count(Released) <= 1
        assert kinds.count(Drained) <= 1
        order = [k for k in kinds if k in (*RESULTS, Released, Drained)]
        assert order == kinds
        if Released in kinds:
            assert kinds[0] in RESULTS and kinds[1] is Released
        if Drained in kinds:
            assert kinds.index(Drained) == 2 and not self.emitted[1].drained

    def end(self) -> None:
        """Everything that runs ends, the peer stops, time passes: the leg must be gone then."""
        for _ in range(200):
            if self.leg.state is lg.LegState.RELEASED:
                break
            for op in tuple(self.running):
                self.running.discard(op)
                self.ended.add(op)
                self.send(lg.OpDone(ATTEMPT, op, ok=False, reason="over"))
            self.peer_writing = False
            self.now = max(self.now, min(self.leg.timer_s, self.now + 1e3))
            self.send(lg.Tick(ATTEMPT))
            self.send(lg.DrainAnswer(ATTEMPT, drained=True))
        assert self.leg.state is lg.LegState.RELEASED
        self.check_order()
        assert sum(k in RESULTS for k in self.kinds()) == 1
        assert self.kinds().count(Released) == 1
        assert self.forgotten == 1
        assert (Drained in self.kinds()) == (not self.emitted[1].drained)


def world(side: lg.Side, *, peer_writes: bool = True, deadline: float = 10.0, timeout: float = 2.0) -> World:
    leg = lg.new_leg(ATTEMPT, side, deadline_s=deadline, timeout_s=timeout, peer_writes=peer_writes)
    return World(leg, peer_writing=not leg.peer_clear)


def apply(w: World, choice: str, number: int) -> None:
    ops = sorted(w.running)
    match choice:
        case "admit":
            w.send(lg.Admit(ATTEMPT))
        case "admit-bad":
            w.send(lg.Admit(ATTEMPT, "layouts differ"))
        case "blocks":
            w.send(lg.Blocks(ATTEMPT, (piece(number), piece(number + 1))))
        case "finish":
            w.send(lg.Finish(ATTEMPT))
        case "done" if ops:
            op = ops[number % len(ops)]
            w.running.discard(op)
            w.ended.add(op)
            w.send(lg.OpDone(ATTEMPT, op, ok=True, moved_bytes=64))
        case "done-bad" if ops:
            op = ops[number % len(ops)]
            w.running.discard(op)
            w.ended.add(op)
            w.send(lg.OpDone(ATTEMPT, op, ok=False, reason="broken pipe"))
        case "done-unsettled" if ops:
            # Reported, but it stays in `running`: bytes may still move.
            w.send(lg.OpDone(ATTEMPT, ops[number % len(ops)], ok=False, settled=False, reason="timeout"))
        case "done-old":
            if number not in w.running:
                w.send(lg.OpDone(ATTEMPT, number, ok=True))
        case "commit":
            w.send(lg.Commit(ATTEMPT, ok=True))
        case "commit-bad":
            w.send(lg.Commit(ATTEMPT, ok=False, stage="computing", reason="prefill died"))
        case "checked" if w.checks:
            w.send(lg.Checked(ATTEMPT))
        case "checked-bad" if w.checks:
            w.send(lg.Checked(ATTEMPT, "key digest differs"))
        case "cancel":
            w.send(lg.Cancel(ATTEMPT, "client left"))
        case "peer-stops":
            w.peer_writing = False
        case "run-out":
            w.ended |= w.running
            if w.leg.closing:
                w.running.clear()
        case "drain-answer":
            w.send(lg.DrainAnswer(ATTEMPT, drained=not w.running and not w.peer_writing))
        case "drain-no":
            w.send(lg.DrainAnswer(ATTEMPT, drained=False))
        case "tick":
            w.now += number / 4
            w.send(lg.Tick(ATTEMPT))
        case "stranger":
            before = w.leg.state
            for event in (lg.Cancel("a-2", "no"), lg.Finish("a-0"), lg.DrainAnswer("a-0", True), lg.Tick("x")):
                assert w.send(event) == ()
            assert w.leg.state is before


CHOICES = ["admit", "admit-bad", "blocks", "finish", "done", "done-bad", "done-unsettled", "done-old", "commit"]
CHOICES += ["commit-bad", "checked", "checked-bad", "cancel", "peer-stops", "run-out", "drain-answer", "drain-no"]
CHOICES += ["tick", "stranger"]
steps = st.lists(st.tuples(st.sampled_from(CHOICES), st.integers(0, 6)), max_size=40)


@given(side=st.sampled_from(lg.Side), peer_writes=st.booleans(), events=steps)
@settings(max_examples=600)
def test_any_sequence_ends_with_one_result_and_one_release(
    side: lg.Side, peer_writes: bool, events: list[tuple[str, int]]
) -> None:
    w = world(side, peer_writes=peer_writes)
    for choice, number in events:
        apply(w, choice, number)
        w.check_order()
    w.end()


@given(side=st.sampled_from(lg.Side), events=steps)
def test_repeating_an_event_does_nothing(side: lg.Side, events: list[tuple[str, int]]) -> None:
    w = world(side)

    class Twice(World):
        def send(self, event: lg.Event) -> tuple[lg.Action, ...]:
            actions = super().send(event)
            again, more = lg.step(self.leg, event, self.now)
            assert more == ()
            assert replace(again, dropped=0) == replace(self.leg, dropped=0)
            return actions

    w = Twice(w.leg, peer_writing=w.peer_writing)
    for choice, number in events:
        apply(w, choice, number)


@given(side=st.sampled_from(lg.Side), events=steps)
def test_released_is_told_in_bounded_time_even_if_nothing_ever_answers(
    side: lg.Side, events: list[tuple[str, int]]
) -> None:
    w = world(side)
    for choice, number in events:
        apply(w, choice, number)
    w.now = max(w.now, 10.0)
    w.send(lg.Tick(ATTEMPT))
    w.now += lg.RELEASE_BOUND_S
    w.send(lg.Tick(ATTEMPT))
    assert w.kinds().count(Released) == 1


@given(order=st.permutations(range(4)), data=st.data())
def test_writes_may_end_in_any_order_and_the_record_is_last(order: list[int], data: st.DataObject) -> None:
    w = world(lg.Side.SEND)
    w.send(lg.Admit(ATTEMPT))
    for index in range(4):
        w.send(lg.Blocks(ATTEMPT, (piece(index),)))
    finish_after = data.draw(st.integers(0, 4))
    for position, op in enumerate(order):
        if position == finish_after:
            w.send(lg.Finish(ATTEMPT))
        w.running.discard(op)
        w.send(lg.OpDone(ATTEMPT, op, ok=True, moved_bytes=64))
    if finish_after == 4:
        w.send(lg.Finish(ATTEMPT))
    assert w.running == {4}
    w.running.clear()
    w.now = 0.25
    w.send(lg.OpDone(ATTEMPT, 4, ok=True))
    assert w.kinds() == [Sent, Released]
    assert w.emitted[0].sent_bytes == 256
    assert w.emitted[0].seconds == 0.25


def test_zero_work_writes_only_the_record() -> None:
    w = world(lg.Side.SEND)
    w.send(lg.Admit(ATTEMPT))
    assert w.send(lg.Finish(ATTEMPT)) == (lg.WriteRecord(0),)
    w.running.clear()
    w.send(lg.OpDone(ATTEMPT, 0, ok=True))
    assert w.kinds() == [Sent, Released]


def test_receive_reads_checks_and_completes() -> None:
    w = world(lg.Side.RECEIVE)
    w.send(lg.Admit(ATTEMPT))
    assert w.send(lg.Commit(ATTEMPT, ok=True)) == (lg.Read(0),)
    w.running.clear()
    assert w.send(lg.OpDone(ATTEMPT, 0, ok=True)) == (lg.Check(),)
    w.send(lg.Checked(ATTEMPT))
    assert w.kinds() == [lg.EmitReceived, Released]
    assert w.asked == 0


def test_prefill_failure_keeps_its_stage_and_quarantines_until_the_peer_answers() -> None:
    w = world(lg.Side.RECEIVE)
    w.send(lg.Admit(ATTEMPT))
    w.send(lg.Commit(ATTEMPT, ok=False, stage="computing", reason="out of memory"))
    assert w.emitted == [Failed(attempt=ATTEMPT, stage="computing", reason="out of memory")]
    assert w.stopped and w.asked == 1
    w.send(lg.DrainAnswer(ATTEMPT, drained=False))
    w.now = w.leg.timer_s
    w.send(lg.Tick(ATTEMPT))
    assert w.asked == 2
    w.now = lg.RELEASE_BOUND_S
    w.send(lg.Tick(ATTEMPT))
    assert w.leg.state is lg.LegState.QUARANTINED
    assert w.emitted[-1] == Released(attempt=ATTEMPT, drained=False)
    w.peer_writing = False
    w.send(lg.DrainAnswer(ATTEMPT, drained=True))
    assert w.kinds() == [Failed, Released, Drained]


def test_drain_answer_in_time_means_no_quarantine() -> None:
    w = world(lg.Side.RECEIVE)
    w.send(lg.Admit(ATTEMPT))
    w.send(lg.Cancel(ATTEMPT, "client left"))
    w.peer_writing = False
    w.send(lg.DrainAnswer(ATTEMPT, drained=True))
    assert w.kinds() == [Failed, Released] and w.emitted[1].drained


def test_asks_back_off_and_never_stop() -> None:
    w = world(lg.Side.RECEIVE)
    w.send(lg.Admit(ATTEMPT))
    w.send(lg.Cancel(ATTEMPT, "client left"))
    times = [0.0]
    for _ in range(12):
        asked = w.asked
        w.send(lg.DrainAnswer(ATTEMPT, drained=False))
        while w.asked == asked:
            w.now = w.leg.timer_s
            w.send(lg.Tick(ATTEMPT))
        times.append(w.now)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps == pytest.approx(sorted(gaps))
    assert gaps[0] == pytest.approx(lg.ASK_BACKOFF_S) and gaps[-1] == pytest.approx(lg.ASK_BACKOFF_MAX_S)


@pytest.mark.parametrize("side", lg.Side)
def test_deadline_fails_with_the_state_as_stage(side: lg.Side) -> None:
    w = world(side, deadline=3.0)
    w.send(lg.Admit(ATTEMPT))
    w.peer_writing = False
    w.now = 2.9
    assert w.send(lg.Tick(ATTEMPT)) == ()
    w.now = 3.0
    w.send(lg.Tick(ATTEMPT))
    assert isinstance(w.emitted[0], Failed) and w.emitted[0].stage == "reserved"


def test_the_timeout_after_finish_is_shorter_than_the_deadline() -> None:
    w = world(lg.Side.SEND, deadline=100.0, timeout=2.0)
    w.send(lg.Admit(ATTEMPT))
    w.send(lg.Blocks(ATTEMPT, (piece(0),)))
    w.now = 50.0
    w.send(lg.Finish(ATTEMPT))
    assert w.leg.timer_s == 52.0


def test_late_messages_are_counted() -> None:
    w = world(lg.Side.SEND)
    w.send(lg.Admit(ATTEMPT))
    w.send(lg.Cancel(ATTEMPT, "x"))
    assert w.leg.state is lg.LegState.RELEASED
    for event in (lg.Finish(ATTEMPT), lg.OpDone(ATTEMPT, 0, ok=True), lg.Commit(ATTEMPT, ok=True)):
        assert w.send(event) == ()
    assert w.leg.dropped == 3


@pytest.mark.parametrize("module", ["leg", "memory", "record", "agent"])
def test_pure_modules_load_without_torch_or_mooncake(module: str) -> None:
    code = (
        f"import sys, isthmus_runtime.transfer.{module}; "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'mooncake', 'triton', 'numpy')]; "
        "raise SystemExit(', '.join(bad) or None)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
