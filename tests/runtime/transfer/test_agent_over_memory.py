"""Two agents over the in-process fabric, on a virtual clock, with and without injected faults."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.config import TransferConfig
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.interfaces.handoff import (
    BlockRef,
    Drained,
    Failed,
    HandoffEvent,
    PromptResult,
    Received,
    ReceiveJob,
    Released,
    SendJob,
    Sent,
)
from isthmus_runtime.interfaces.transport import KvRegion
from isthmus_runtime.protocol.calls import CommitCall
from isthmus_runtime.transfer import checksums as module
from isthmus_runtime.transfer.agent import TransferAgent
from isthmus_runtime.transfer.checksums import block_crc32
from isthmus_runtime.transfer.factory import make_transfer
from isthmus_runtime.transfer.memory import Faults, MemoryFabric, MemoryTransfer

BLOCK = 64
RESULTS = (Sent, Received, Failed)
E = TypeVar("E", bound=HandoffEvent)


def prompt_of(tokens: int = 40) -> PromptResult:
    return PromptResult(num_tokens=tokens, first_token=7)


@dataclass
class Node:
    name: str
    fabric: MemoryFabric
    agent: TransferAgent
    transfer: MemoryTransfer
    events: list[HandoffEvent] = field(default_factory=list)
    buffer: mmap.mmap | None = None

    def kinds(self, attempt: str) -> list[type[HandoffEvent]]:
        return [type(e) for e in self.events if e.attempt == attempt]

    def only(self, attempt: str, kind: type[E]) -> E:
        return next(e for e in self.events if e.attempt == attempt and isinstance(e, kind))


@dataclass
class Pair:
    fabric: MemoryFabric
    prefill: Node
    decode: Node
    now: float = 0.0

    def open(self, attempt: str, blocks: list[int], *, skip: int = 0, deadline: float = 60.0, tokens: int = 40) -> None:
        refs = tuple(BlockRef(skip + i, b, f"key-{attempt}-{skip + i}", 0) for i, b in enumerate(blocks))
        job = ReceiveJob(
            request_id="r",
            attempt=attempt,
            skip_blocks=skip,
            blocks=refs,
            num_tokens=tokens,
            peer_url=self.prefill.name,
            peer_epoch="e1",
            deadline_s=deadline,
        )
        ticket = self.decode.agent.open_receive(job, self.now)
        send = SendJob(request_id="r", attempt=attempt, ticket=ticket, deadline_s=deadline)
        self.prefill.agent.open_send(send, self.now)

    def send(self, attempt: str, indices: list[int], offset: int = 100) -> None:
        refs = [BlockRef(i, offset + i, f"key-{attempt}-{i}", 0) for i in indices]
        self.prefill.agent.send_blocks(attempt, refs, self.now)

    def commit(self, attempt: str, *, ok: bool = True) -> None:
        call = CommitCall(request_id="r", attempt=attempt, ok=ok, stage="" if ok else "computing", reason="x")
        self.decode.agent.commit(call, self.now)

    def run(self, until: float) -> None:
        while True:
            times = [t for n in (self.prefill, self.decode) if (t := n.agent.next_deadline()) is not None]
            if (t := self.fabric.next_time()) is not None:
                times.append(t)
            due = min((t for t in times if t <= until), default=None)
            if due is None:
                break
            self.now = max(self.now, due)
            self.fabric.advance(self.now)
            self.prefill.agent.tick(self.now)
            self.decode.agent.tick(self.now)
            self.route()
        self.now = until
        self.fabric.advance(until)

    committed: set[str] = field(default_factory=set)

    def route(self) -> None:
        """The router: tells decode how prefill ended, once."""
        for event in tuple(self.prefill.events):
            if isinstance(event, Sent | Failed) and event.attempt not in self.committed:
                self.committed.add(event.attempt)
                self.commit(event.attempt, ok=isinstance(event, Sent))


def make_pair(
    faults: Faults | None = None,
    *,
    seed: int = 0,
    real: bool = False,
    crc: bool = False,
    layout: str = "L",
    vocab_size: int = 0,
) -> Pair:
    fabric = MemoryFabric(seed=seed, faults=faults)
    pair: Pair
    nodes = []
    for name in ("prefill", "decode"):
        buffer = mmap.mmap(-1, 256 * BLOCK) if real else None
        base = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer is not None else 0
        digest = layout if name == "decode" else "L"
        memory = KvRegion(base=base, num_blocks=256, block_bytes=BLOCK, block_stride=BLOCK, layout_digest=digest)
        cfg = TransferConfig(mode="memory", timeout_s=2.0, verify_crc=crc)
        transfer = make_transfer(cfg, fabric=fabric, name=name, epoch="e1")
        assert isinstance(transfer, MemoryTransfer)
        transfer.prepare(memory, 1.0)
        events: list[HandoffEvent] = []
        agent = TransferAgent(transfer, memory, cfg, events.append, lambda: pair.now, vocab_size=vocab_size)
        fabric.serve_drain(name, agent.is_drained)
        nodes.append(Node(name, fabric, agent, transfer, events, buffer))
    pair = Pair(fabric, *nodes)
    return pair


def test_blocks_move_while_more_are_computed_and_decode_gets_the_record() -> None:
    pair = make_pair(real=True)
    source = pair.prefill.buffer
    assert source is not None and pair.decode.buffer is not None
    for i in range(4):
        source[(100 + i) * BLOCK : (101 + i) * BLOCK] = bytes([i + 1]) * BLOCK
    pair.open("a", [9, 3, 4, 200])
    pair.send("a", [0, 1])
    pair.run(0.1)
    assert pair.decode.buffer[9 * BLOCK : 10 * BLOCK] == b"\1" * BLOCK
    pair.send("a", [2])
    pair.send("a", [3])
    pair.prefill.agent.finish_send("a", prompt_of(), pair.now)
    pair.run(1.0)
    assert pair.prefill.kinds("a") == [Sent, Released]
    assert pair.decode.kinds("a") == [Received, Released]
    record = pair.decode.only("a", Received).record
    assert record.first_token == 7 and record.block_bytes == BLOCK
    assert [pair.decode.buffer[b * BLOCK] for b in (9, 3, 4, 200)] == [1, 2, 3, 4]
    assert pair.prefill.only("a", Sent).sent_bytes == 4 * BLOCK
    assert pair.prefill.agent.next_deadline() is None and pair.decode.agent.next_deadline() is None


def test_a_first_token_that_the_model_does_not_have_reaches_no_executor() -> None:
    pair = make_pair(vocab_size=7)
    pair.open("a", [9])
    pair.send("a", [0])
    pair.prefill.agent.finish_send("a", prompt_of(), pair.now)
    pair.run(1.0)
    assert "token id 7, the model has ids 0 to 6" in pair.decode.only("a", Failed).reason
    assert Received not in pair.decode.kinds("a")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_attempt_that_was_given_up_is_no_failure(side: str) -> None:
    pair = make_pair()
    pair.open("a", [5, 6])
    pair.send("a", [0])
    node = pair.prefill if side == "prefill" else pair.decode
    node.agent.cancel("a", "the client left", pair.now)
    assert node.only("a", Failed).given_up
    pair.run(1.0)
    if side == "decode":
        assert pair.prefill.agent.is_drained("a") and pair.prefill.only("a", Failed).given_up
    assert node.agent.stats().failed == 0


def test_blocks_decode_has_are_not_sent() -> None:
    pair = make_pair()
    pair.open("a", [5, 6], skip=2)
    pair.send("a", [0, 1, 2, 3])
    pair.prefill.agent.finish_send("a", prompt_of(), pair.now)
    pair.run(1.0)
    assert pair.decode.kinds("a") == [Received, Released]
    assert pair.decode.transfer.contents == {5: "key-a-2", 6: "key-a-3"}


@pytest.mark.parametrize("given_indices", [[0, 1], [0, 1, 3], [1, 2, 3]])
def test_a_missing_block_is_a_failure_on_both_sides(given_indices: list[int]) -> None:
    pair = make_pair()
    pair.open("a", [1, 2, 3, 4])
    pair.send("a", given_indices)
    pair.prefill.agent.finish_send("a", prompt_of(), pair.now)
    pair.run(1.0)
    assert pair.prefill.kinds("a") == [Failed, Released]
    assert "all or none" in pair.prefill.only("a", Failed).reason
    assert pair.decode.kinds("a") == [Failed, Released]


def test_more_blocks_than_reserved_are_refused() -> None:
    pair = make_pair()
    pair.open("a", [1])
    pair.send("a", [0, 1])
    assert "decode reserved 1" in pair.prefill.only("a", Failed).reason


def test_layouts_that_differ_are_refused_naming_both() -> None:
    pair = make_pair(layout="other")
    pair.open("a", [1])
    reason = pair.prefill.only("a", Failed).reason
    assert "other" in reason and "has L" in reason


def test_a_call_meant_for_an_earlier_process_is_refused() -> None:
    pair = make_pair()
    pair.prefill.agent = TransferAgent(
        pair.prefill.transfer,
        KvRegion(base=0, num_blocks=256, block_bytes=BLOCK, block_stride=BLOCK, layout_digest="L"),
        TransferConfig(mode="memory"),
        pair.prefill.events.append,
        lambda: pair.now,
        epoch="e2",
    )
    pair.open("a", [1])
    assert pair.prefill.kinds("a") == [Failed, Released]
    assert "process e1" in pair.prefill.only("a", Failed).reason


def test_other_token_count_is_refused() -> None:
    pair = make_pair()
    pair.open("a", [1])
    pair.send("a", [0])
    pair.prefill.agent.finish_send("a", prompt_of(tokens=39), pair.now)
    pair.run(1.0)
    failed = pair.decode.only("a", Failed)
    assert failed.reason == "record has token count 39, decode expects 40" and failed.stage == "receiving"


def test_a_drain_question_ends_the_attempt_and_bars_it_from_coming_back() -> None:
    pair = make_pair()
    assert pair.prefill.agent.is_drained("a")
    pair.open("a", [1])
    assert pair.prefill.kinds("a") == [Failed, Released]
    assert "ended before" in pair.prefill.only("a", Failed).reason
    pair.open("b", [2])
    pair.send("b", [0])
    assert not pair.prefill.agent.is_drained("b")
    pair.run(0.4)
    assert pair.prefill.agent.is_drained("b")
    assert pair.prefill.kinds("b") == [Failed, Released]


def test_messages_for_unknown_attempts_are_counted() -> None:
    pair = make_pair()
    pair.prefill.agent.send_blocks("x", [BlockRef(0, 1, "k", 0)], 0.0)
    pair.prefill.agent.finish_send("x", prompt_of(), 0.0)
    pair.prefill.agent.cancel("x", "gone", 0.0)
    pair.commit("x")
    assert pair.prefill.agent.stats().dropped == 3 and pair.decode.agent.stats().dropped == 1


def test_a_write_that_never_ends_quarantines_both_sides_and_drains_later() -> None:
    pair = make_pair(Faults(never=1.0, late_s=5.0))
    pair.open("a", [1])
    pair.send("a", [0])
    pair.prefill.agent.finish_send("a", prompt_of(), pair.now)
    pair.run(4.0)
    for node in (pair.prefill, pair.decode):
        assert node.kinds("a") == [Failed, Released], node.name
        assert not node.only("a", Released).drained
        assert node.agent.stats().quarantined == 1
    pair.run(80.0)
    for node in (pair.prefill, pair.decode):
        assert node.kinds("a") == [Failed, Released, Drained], node.name
        assert node.agent.stats().live == 0


def test_a_crashed_prefill_counts_as_drained() -> None:
    pair = make_pair(Faults(never=1.0, late_s=500.0))
    pair.open("a", [1])
    pair.send("a", [0])
    pair.fabric.crash("prefill")
    pair.commit("a", ok=False)
    pair.run(1.0)
    assert pair.decode.kinds("a") == [Failed, Released]
    assert pair.decode.only("a", Released).drained


def test_checksums_catch_damaged_blocks() -> None:
    pair = make_pair(real=True, crc=True)
    assert pair.decode.buffer is not None and pair.prefill.buffer is not None
    done = threading.Event()
    pair.prefill.agent._notify = lambda e: (pair.prefill.events.append(e), done.set())  # type: ignore[assignment]
    pair.prefill.buffer[100 * BLOCK : 101 * BLOCK] = bytes(range(64))
    pair.open("a", [1])
    pair.send("a", [0])
    pair.prefill.agent.finish_send("a", prompt_of(), pair.now)
    for _ in range(500):
        if done.wait(0.01):
            break
        pair.fabric.advance(pair.now)
        pair.now += 0.001
    assert pair.prefill.kinds("a") == [Sent, Released]
    pair.decode.buffer[BLOCK + 5] ^= 1
    ended = threading.Event()
    pair.decode.agent._notify = lambda e: (pair.decode.events.append(e), ended.set())  # type: ignore[assignment]
    pair.commit("a")
    pair.now += 0.1
    pair.fabric.advance(pair.now)
    assert ended.wait(10)
    assert "CRC-32" in pair.decode.only("a", Failed).reason
    pair.prefill.agent.close()
    pair.decode.agent.close()


@pytest.mark.parametrize("stuck", [False, True])
def test_checksums_do_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stuck: bool
) -> None:
    """The rest of a long prompt is left out; one block that is stuck is given up."""
    pair = make_pair(real=True, crc=True)
    computed, began, go_on = list[int](), threading.Event(), threading.Event()

    def one(region: KvRegion, block: int, crc: int) -> int:
        computed.append(block)
        began.set()
        assert go_on.wait(20)
        return 0

    monkeypatch.setattr(module, "block_crc32", one)
    agent = pair.prefill.agent
    pair.open("a", [1, 2])
    pair.send("a", [0, 1])
    agent.finish_send("a", prompt_of(), pair.now)
    for _ in range(500):
        pair.fabric.advance(pair.now)
        pair.now += 0.001
        if began.wait(0.01):
            break
    closing = threading.Thread(target=agent.close, args=(0.1 if stuck else 20.0,), daemon=True)
    closing.start()
    assert agent._checksums is not None and agent._checksums._closing.wait(20)
    if stuck:
        closing.join(10)
        assert not closing.is_alive(), "it waits without a deadline"
    go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    assert computed == [100], "it went on with the next block"
    assert ("a checksum has not ended" in caplog.text) == stuck
    pair.decode.agent.close()


def test_crc_is_over_the_payload_in_order() -> None:
    import zlib

    raw = bytearray(range(256)) * 2
    base = ctypes.addressof(ctypes.c_char.from_buffer(raw))
    memory = KvRegion(base=base, num_blocks=4, block_bytes=100, block_stride=128, layout_digest="L")
    expected = zlib.crc32(bytes(raw[256:356]) + bytes(raw[0:100]))
    assert block_crc32(memory, 0, block_crc32(memory, 2, 0)) == expected


fault_rates = st.fixed_dictionaries(
    {},
    optional={
        name: st.sampled_from([0.05, 0.3, 1.0])
        for name in ("drop", "partial", "wrote_all_but_failed", "never", "duplicate", "stale", "evicted", "delay")
    },
)


@given(
    seed=st.integers(0, 2**16),
    rates=fault_rates,
    cancels=st.lists(st.tuples(st.integers(0, 5), st.floats(0, 3), st.booleans()), max_size=4),
    crash_at=st.none() | st.floats(0, 3),
)
@settings(max_examples=150)
def test_under_any_faults_every_attempt_ends_and_no_released_block_is_written(
    seed: int, rates: dict[str, float], cancels: list[tuple[int, float, bool]], crash_at: float | None
) -> None:
    pair = make_pair(Faults(**rates, late_s=3.0), seed=seed)
    free: set[int] = set()

    def written(attempt: str, block: int) -> None:
        assert block not in free, f"attempt {attempt} wrote into block {block}, which was released"

    pair.decode.transfer.on_block_written = written
    seen = 0

    def watch() -> None:
        nonlocal seen
        for event in pair.decode.events[seen:]:
            if (isinstance(event, Released) and event.drained) or isinstance(event, Drained):
                number = int(event.attempt[1:])
                free.update(range(10 * number, 10 * number + 4))
        seen = len(pair.decode.events)

    times = sorted(
        [(0.2 * n, "open", n) for n in range(6)]
        + [(0.2 * n + 0.1, "finish", n) for n in range(6)]
        + [(t, "cancel-prefill" if side else "cancel-decode", n) for n, t, side in cancels]
        + ([(crash_at, "crash", 0)] if crash_at is not None else [])
    )
    crashed = False
    for at, what, n in times:
        attempt = f"a{n}"
        while pair.now < at:
            pair.run(min(at, pair.now + 0.01))
            watch()
        if crashed and what != "cancel-decode":
            if what == "open":
                continue
            pair.commit(attempt, ok=False)
            continue
        match what:
            case "open":
                pair.open(attempt, [10 * n + i for i in range(4)])
                pair.send(attempt, [0, 1], offset=100 + 4 * n)
            case "finish":
                pair.send(attempt, [2, 3], offset=100 + 4 * n)
                pair.prefill.agent.finish_send(attempt, prompt_of(), pair.now)
            case "cancel-prefill":
                pair.prefill.agent.cancel(attempt, "test", pair.now)
            case "cancel-decode":
                pair.decode.agent.cancel(attempt, "test", pair.now)
            case "crash":
                pair.fabric.crash("prefill")
                crashed = True
                for number in range(6):
                    pair.commit(f"a{number}", ok=False)
        pair.route()
        watch()
    end = pair.now + 80.0
    while pair.now < end:
        pair.run(pair.now + 0.5)
        watch()
    for node in (pair.prefill, pair.decode):
        if crashed and node is pair.prefill:
            continue
        for attempt in {e.attempt for e in node.events}:
            kinds = node.kinds(attempt)
            assert sum(k in RESULTS for k in kinds) == 1, (node.name, attempt, kinds)
            assert kinds.count(Released) == 1
            assert kinds.count(Drained) == (not node.only(attempt, Released).drained)
        assert node.agent.stats().live == 0
    for attempt in {e.attempt for e in pair.decode.events if isinstance(e, Received)}:
        number = int(attempt[1:])
        assert [pair.decode.transfer.contents[10 * number + i] for i in range(4)] == [
            f"key-{attempt}-{i}" for i in range(4)
        ]


def test_the_same_seed_gives_the_same_run() -> None:
    def run(seed: int) -> list[HandoffEvent]:
        pair = make_pair(Faults(drop=0.2, never=0.1, delay=0.3), seed=seed)
        for n in range(10):
            pair.open(f"a{n}", [4 * n + i for i in range(4)])
            pair.send(f"a{n}", [0, 1, 2, 3])
            pair.prefill.agent.finish_send(f"a{n}", prompt_of(), pair.now)
        pair.run(60.0)
        return pair.decode.events

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_in_real_time_within_one_process() -> None:
    fabric = MemoryFabric()
    fabric.start(time.monotonic)
    done = threading.Event()
    events: list[HandoffEvent] = []
    memory = KvRegion(base=0, num_blocks=8, block_bytes=BLOCK, block_stride=BLOCK, layout_digest="L")
    cfg = TransferConfig(mode="memory")
    agents = {}
    for name in ("prefill", "decode"):
        transfer = fabric.connect(name, "e1")
        transfer.prepare(memory, 1.0)

        def notify(event: HandoffEvent) -> None:
            events.append(event)
            if isinstance(event, Sent):
                agents["decode"].commit(CommitCall(request_id="r", attempt="a", ok=True), time.monotonic())
            if isinstance(event, Received):
                done.set()

        agents[name] = TransferAgent(transfer, memory, cfg, notify, time.monotonic)
    now = time.monotonic()
    job = ReceiveJob(
        request_id="r",
        attempt="a",
        skip_blocks=0,
        blocks=(BlockRef(0, 1, "k", 0),),
        num_tokens=40,
        peer_url="prefill",
        peer_epoch="e1",
        deadline_s=now + 10,
    )
    ticket = agents["decode"].open_receive(job, now)
    agents["prefill"].open_send(SendJob(request_id="r", attempt="a", ticket=ticket, deadline_s=now + 10), now)
    agents["prefill"].send_blocks("a", [BlockRef(0, 2, "k", 0)], now)
    agents["prefill"].finish_send("a", prompt_of(), now)
    assert done.wait(10), events
    fabric.stop()


def test_the_factory_refuses_what_moves_nothing() -> None:
    with pytest.raises(ConfigError, match="moves no KV"):
        make_transfer(TransferConfig())
    with pytest.raises(ConfigError, match="one process"):
        make_transfer(TransferConfig(mode="memory"))
    with pytest.raises(ConfigError, match="only tcp"):
        make_transfer(TransferConfig(mode="store", transport="rdma"))


def test_a_leg_that_is_released_and_not_yet_forgotten_has_no_deadline() -> None:
    # Another thread may be between the two while the engine thread asks how long it may sleep.
    pair = make_pair()
    agent, seen = pair.prefill.agent, list[float | None]()
    agent._notify = lambda event: seen.append(agent.next_deadline())
    pair.open("a", [1])
    pair.send("a", [0])
    agent.finish_send("a", prompt_of(), pair.now)
    pair.run(1.0)
    assert seen == [None, None]
