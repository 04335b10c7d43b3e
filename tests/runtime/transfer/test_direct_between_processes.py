"""Direct mode with real TransferEngines in processes of their own, on loopback."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from isthmus_runtime.errors import ConfigError, Overloaded
from isthmus_runtime.interfaces.transport import KvRegion, Piece
from isthmus_runtime.transfer.greeting import Greeter, greeting_problem
from isthmus_runtime.transfer.slots import SLOT_BYTES, RecordSlots
from isthmus_runtime.transfer.transport import Run, choose_transport, merge_runs, transport_environment

pytestmark = pytest.mark.slow  # starts processes, and waits for deadlines to pass

Start = Callable[..., Any]
SLOW_S = 60.0
AT_ONCE_S = SLOW_S / 2
"""What is noticed by itself comes long before the timeout, SLOW_S, for which all else waits."""


def open_pair(prefill: Any, decode: Any, attempt: str, ids: list[int], *, deadline: float = 60.0) -> dict[str, Any]:
    blocks = [[i, b, f"k{attempt}{i}"] for i, b in enumerate(ids)]
    hello = prefill.hello
    ticket = decode.call(
        "open_receive",
        attempt=attempt,
        blocks=blocks,
        tokens=40,
        url=hello["url"],
        epoch=hello["epoch"],
        deadline=deadline,
    )
    prefill.call("open_send", attempt=attempt, ticket=ticket, deadline=deadline)
    return dict(ticket)


def send(prefill: Any, attempt: str, pairs: list[tuple[int, int]]) -> None:
    prefill.call("send_blocks", attempt=attempt, blocks=[[i, b, f"k{attempt}{i}"] for i, b in pairs])


def test_scattered_and_adjacent_blocks_arrive_and_the_record_is_read(start_engine: Start) -> None:
    prefill, decode = start_engine("direct"), start_engine("direct")
    assert decode.hello["gbps"] > 0
    theirs = [5, 6, 7, 40, 2, 9, 10, 63]
    mine = [11, 12, 13, 30, 31, 1, 2, 50]
    prefill.call("fill", blocks=mine, seed=3)
    for attempt in ("a", "b"):
        open_pair(prefill, decode, attempt, theirs)
        send(prefill, attempt, list(enumerate(mine))[:3])
        send(prefill, attempt, list(enumerate(mine))[3:])
        prefill.call("finish_send", attempt=attempt, tokens=40)
        sent = prefill.event(attempt, "sent", "failed")
        assert sent["event"] == "sent", sent
        assert sent["sent_bytes"] == 8 * 65536
        decode.call("commit", attempt=attempt, ok=True)
        received = decode.event(attempt, "received", "failed")
        assert received["event"] == "received", received
        assert received["first_token"] == 11
        assert decode.call("crc", blocks=theirs) == prefill.call("crc", blocks=mine)
        for engine in (prefill, decode):
            engine.event(attempt, "released")
            assert engine.call("live") == 0
    untouched = decode.call("crc", blocks=[0, 1, 3, 4, 8])
    assert len(set(untouched)) == 1, "a block that was not reserved was written"


def test_checksums_are_taken_on_both_sides(start_engine: Start) -> None:
    prefill, decode = start_engine("direct", "crc"), start_engine("direct", "crc")
    prefill.call("fill", blocks=[1, 2, 3], seed=3)
    for attempt in ("good", "bad"):
        open_pair(prefill, decode, attempt, [5, 6, 9])
        send(prefill, attempt, [(0, 1), (1, 2), (2, 3)])
        prefill.call("finish_send", attempt=attempt, tokens=40)
        assert prefill.event(attempt, "sent", "failed")["event"] == "sent"
        if attempt == "bad":
            decode.call("fill", blocks=[6], seed=77)
        decode.call("commit", attempt=attempt, ok=True)
        # Both attempts use the same blocks: one is over before the next begins.
        ended = decode.event(attempt, "received", "failed")
        assert ended["event"] == "received" if attempt == "good" else "CRC-32" in ended["reason"], ended


def test_nothing_is_written_to_a_decode_that_was_restarted_at_the_same_address(start_engine: Start) -> None:
    """A ticket of the process before it names a port and addresses that are the new one's."""
    prefill, decode, before = start_engine("direct"), start_engine("direct"), start_engine("direct")
    hello, gone = prefill.hello, before.hello["epoch"]
    blocks = [[0, 5, "k"], [1, 6, "k"]]
    ticket = decode.call("open_receive", attempt="a", blocks=blocks, tokens=40, url=hello["url"], epoch=hello["epoch"])
    assert ticket["epoch"] == decode.hello["epoch"] != gone
    prefill.call("fill", blocks=[1, 2], seed=3)
    untouched = decode.call("crc", blocks=[5, 6])
    prefill.call("open_send", attempt="a", ticket={**ticket, "epoch": gone})
    send(prefill, "a", [(0, 1), (1, 2)])
    failed = prefill.event("a", "failed")
    assert "refuses the ticket: the ticket is not as this process signed it" in failed["reason"], failed
    assert prefill.event("a", "released")["drained"]
    assert decode.call("crc", blocks=[5, 6]) == untouched


def test_a_decode_that_is_replaced_during_a_transfer_gets_no_further_block(start_engine: Start) -> None:
    # More than a fast machine sends while an answer of the peer is still fresh.
    count = 20_000
    prefill = start_engine("direct", blocks=count + 1, block_bytes=64)
    decode = start_engine("direct", blocks=count + 1, block_bytes=64)
    hello = prefill.hello
    blocks = [[i, i + 1, f"ka{i}"] for i in range(count)]
    ticket = decode.call("open_receive", attempt="a", blocks=blocks, tokens=40, url=hello["url"], epoch=hello["epoch"])
    prefill.call("fill", blocks=[1], seed=3)
    stage = Greeter("127.0.0.1", ticket["epoch"], lambda said: "")
    prefill.call("open_send", attempt="a", ticket={**ticket, "greeting": stage.address})
    send(prefill, "a", [(0, 1)])
    written = prefill.call("crc", blocks=[1])
    while decode.call("crc", blocks=[1]) != written:
        assert "failed" not in prefill.kinds("a")
    stage.close()
    sent = 0
    while "failed" not in prefill.kinds("a"):
        sent += 1
        assert sent < count, "it went on writing"
        send(prefill, "a", [(sent, 1)])
    assert "does not answer" in prefill.event("a", "failed")["reason"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"blocks": [{"group": 0, "first": 0, "block_ids": [7, 8]}]}, "not as this process signed it"),
        ({"record_address": 4096}, "not as this process signed it"),
        ({"pool_base": 64}, "not as this process signed it"),
        ({"greeting": ""}, "no ticket of this process was shown"),
        ({"attempt": "b"}, "not as this process signed it"),
        ({}, ""),
    ],
)
def test_nothing_is_written_for_a_ticket_that_was_changed_on_its_way(
    start_engine: Start, changed: dict[str, Any], says: str
) -> None:
    prefill, decode = start_engine("direct"), start_engine("direct")
    hello = prefill.hello
    blocks = [[0, 5, "k"], [1, 6, "k"]]
    ticket = decode.call("open_receive", attempt="a", blocks=blocks, tokens=40, url=hello["url"], epoch=hello["epoch"])
    if changed.get("greeting") == "":
        changed = {"greeting": ticket["greeting"].partition("/")[0]}
    prefill.call("fill", blocks=[1, 2], seed=3)
    everything = list(range(1, 16))
    untouched = decode.call("crc", blocks=everything)
    attempt = changed.get("attempt", "a")
    prefill.call("open_send", attempt=attempt, ticket={**ticket, **changed})
    send(prefill, attempt, [(0, 1), (1, 2)])
    prefill.call("finish_send", attempt=attempt, tokens=40)
    done = prefill.event(attempt, "sent", "failed")
    assert done["event"] == ("failed" if says else "sent")
    assert (decode.call("crc", blocks=everything) == untouched) == bool(says)
    assert says in done.get("reason", "")


def test_a_ticket_is_good_for_its_attempt_while_that_lasts(start_engine: Start) -> None:
    """Neither after its end, which the receiver knows, nor after its deadline."""
    prefill, decode, other = start_engine("direct"), start_engine("direct"), start_engine("direct")
    hello = prefill.hello

    def reserve(attempt: str, **more: Any) -> dict[str, Any]:
        blocks = [[0, 5, "k"]]
        call = {"attempt": attempt, "blocks": blocks, "tokens": 40, "url": hello["url"], "epoch": hello["epoch"]}
        return dict(decode.call("open_receive", **call, **more))

    other.call("fill", blocks=[1], seed=3)
    over = reserve("over")
    decode.call("cancel", attempt="over")
    decode.event("over", "released")
    expired = reserve("expired", deadline=0.0)
    untouched = decode.call("crc", blocks=[5])
    for attempt, ticket, says in (("over", over, "attempt over is over"), ("expired", expired, "expired")):
        other.call("open_send", attempt=attempt, ticket=ticket)  # it was not told that the attempt is over
        send(other, attempt, [(0, 1)])
        failed = other.event(attempt, "sent", "failed")
        assert failed["event"] == "failed" and says in failed["reason"], failed
    assert decode.call("crc", blocks=[5]) == untouched


def test_strangers_who_say_nothing_hold_up_no_greeting() -> None:
    greeter = Greeter("127.0.0.1", "e1", lambda said: "" if said == b"mine" else "not mine")
    host, port = greeter.address.split(":")
    silent = []
    try:
        for number in range(300):
            silent.append(socket.create_connection((host, int(port)), 5))
            if number % 3:
                silent[-1].sendall(b"x" * number)
        assert greeting_problem(greeter.address, b"mine", "e1", SLOW_S) == ""
        assert greeting_problem(greeter.address, b"other", "e1", SLOW_S) == "refuses the ticket: not mine"
        assert "e1 answers, not e2" in greeting_problem(greeter.address, b"mine", "e2", SLOW_S)
        assert greeting_problem(greeter.address, b"mine" * 5000, "e1", 5.0)
    finally:
        greeter.close()
        for one in silent:
            one.close()


def test_a_greeter_that_is_short_of_descriptors_greets_again_once_it_has_some() -> None:
    greeter = Greeter("127.0.0.1", "e1", lambda said: "")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[socket.socket] = []
    try:
        peer = socket.socket()
        peer.settimeout(10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(socket.socket())
        host, port = greeter.address.split(":")
        peer.connect((host, int(port)))
        peer.sendall(b"mine\n")
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert peer.recv(100) == b"e1\n"
        peer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for one in held:
            one.close()
        greeter.close()


def test_a_silent_greeter_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        problem = greeting_problem(f"127.0.0.1:{silent.getsockname()[1]}", b"c", "e", 0.05)
    assert "does not answer" in problem
    assert "is not host:port" in greeting_problem("", b"c", "e", 0.05)


def test_a_peer_that_does_not_exist_fails_at_once(start_engine: Start) -> None:
    prefill = start_engine("direct", timeout=SLOW_S)
    ticket = {
        "mode": "direct",
        "attempt": "a",
        "layout_digest": "L",
        "session": "127.0.0.1:1",
        "greeting": "127.0.0.1:1",
        "pool_base": 4096,
        "block_stride": 65536,
        "blocks": [{"group": 0, "first": 0, "block_ids": [1]}],
        "record_address": 4096,
        "record_capacity": SLOT_BYTES,
    }
    prefill.call("open_send", attempt="a", ticket=ticket)
    send(prefill, "a", [(0, 1)])
    failed = prefill.event("a", "failed")
    assert "127.0.0.1:1 does not answer" in failed["reason"] and failed["stage"] == "computing"
    assert prefill.event("a", "released")["drained"]


def test_an_address_outside_the_pool_is_rejected(start_engine: Start) -> None:
    prefill, decode = start_engine("direct"), start_engine("direct")
    hello = prefill.hello
    ticket = decode.call(
        "open_receive", attempt="a", blocks=[[0, 1, "k"]], tokens=40, url=hello["url"], epoch=hello["epoch"]
    )
    stage = Greeter("127.0.0.1", ticket["epoch"], lambda said: "")  # else the changed ticket would be refused
    prefill.call("open_send", attempt="a", ticket={**ticket, "greeting": stage.address, "pool_base": 64})
    send(prefill, "a", [(0, 1)])
    assert "failed" in prefill.event("a", "failed")["reason"]
    stage.close()
    assert prefill.event("a", "released")["drained"]
    open_pair(prefill, decode, "b", [3])
    send(prefill, "b", [(0, 1)])
    prefill.call("finish_send", attempt="b", tokens=40)
    assert prefill.event("b", "sent", "failed")["event"] == "sent", "the peer must stay usable"


def test_decode_killed_while_blocks_are_on_their_way(start_engine: Start) -> None:
    prefill, decode = start_engine("direct", timeout=SLOW_S), start_engine("direct", timeout=SLOW_S)
    ticket = open_pair(prefill, decode, "a", list(range(1, 60)))
    decode.signal(signal.SIGSTOP)  # so that the bytes are surely on their way
    send(prefill, "a", [(i, i + 1) for i in range(59)])
    killed = decode.kill()
    failed = prefill.event("a", "failed")
    assert failed["at"] - killed < AT_ONCE_S, failed
    assert prefill.event("a", "released")["drained"]
    # A new attempt to the dead peer is refused as fast.
    open_at = prefill.event("a", "released")["at"]
    prefill.call("open_send", attempt="b", ticket={**ticket, "attempt": "b"})
    send(prefill, "b", [(0, 1)])
    assert prefill.event("b", "failed")["at"] - open_at < AT_ONCE_S


def test_prefill_killed_means_drained_for_decode(start_engine: Start) -> None:
    prefill, decode = start_engine("direct", timeout=SLOW_S), start_engine("direct", timeout=SLOW_S)
    open_pair(prefill, decode, "a", [1, 2, 3])
    send(prefill, "a", [(0, 1)])
    prefill.kill()
    decode.call("commit", attempt="a", ok=False, stage="computing")
    failed = decode.event("a", "failed")
    assert failed["stage"] == "computing"
    released = decode.event("a", "released")
    assert released["drained"] and released["at"] - failed["at"] < AT_ONCE_S


def test_a_stopped_prefill_quarantines_until_it_answers_again(start_engine: Start) -> None:
    prefill, decode = start_engine("direct", timeout=SLOW_S), start_engine("direct", timeout=SLOW_S)
    open_pair(prefill, decode, "a", [1, 2, 3])
    prefill.signal(signal.SIGSTOP)
    decode.call("cancel", attempt="a")
    released = decode.event("a", "released")
    assert not released["drained"]
    assert released["at"] - decode.event("a", "failed")["at"] < AT_ONCE_S
    prefill.signal(signal.SIGCONT)
    decode.event("a", "drained")
    assert decode.kinds("a") == ["failed", "released", "drained"]
    assert prefill.event("a", "failed")["reason"] == "decode gave the attempt up"
    assert prefill.event("a", "released")["drained"]


@pytest.mark.parametrize("after", [0.002, 0.03])
def test_blocks_come_back_from_a_prefill_that_stands_still_and_nothing_of_it_lands_later(
    start_engine: Start, after: float
) -> None:
    """It is stopped in the midst of its writes, and goes on when decode has given the blocks to others."""
    big = {"blocks": 128, "block_bytes": 4 << 20}
    prefill, well = start_engine("direct", **big), start_engine("direct", **big)
    decode = start_engine("direct", "silent=0.5", **big)
    ids = list(range(1, 101))
    for name, engine in (("warm", well), ("too", prefill)):
        open_pair(engine, decode, name, [103])
        send(engine, name, [(0, 1)])
        engine.call("finish_send", attempt=name, tokens=40)
        assert engine.event(name, "sent", "failed")["event"] == "sent"
        decode.call("commit", attempt=name, ok=True)
        decode.event(name, "released")
    prefill.call("fill", blocks=ids, seed=3)
    first = open_pair(prefill, decode, "a", ids)["session"]
    open_pair(well, decode, "live", [101, 102])
    send(prefill, "a", list(enumerate(ids)))
    threading.Event().wait(after)
    prefill.signal(signal.SIGSTOP)
    decode.call("commit", attempt="a", ok=False, stage="sending")
    assert not decode.event("a", "released")["drained"]
    # The other's ticket is good to its end, and so is the engine that it names.
    well.call("fill", blocks=[1, 2], seed=5)
    threading.Event().wait(2.0)
    assert "drained" not in decode.kinds("a")
    send(well, "live", [(0, 1), (1, 2)])
    well.call("finish_send", attempt="live", tokens=40)
    sent = well.event("live", "sent", "failed")
    assert sent["event"] == "sent", sent
    decode.call("commit", attempt="live", ok=True)
    assert decode.event("live", "received", "failed")["event"] == "received"
    decode.event("a", "drained")
    decode.call("fill", blocks=ids, seed=9)
    others = decode.call("crc", blocks=ids)
    second = open_pair(well, decode, "b", [101, 102])["session"]
    assert second != first
    send(well, "b", [(0, 1), (1, 2)])
    well.call("finish_send", attempt="b", tokens=40)
    assert well.event("b", "sent", "failed")["event"] == "sent"
    decode.call("commit", attempt="b", ok=True)
    assert decode.event("b", "received", "failed")["event"] == "received"
    prefill.signal(signal.SIGCONT)
    assert prefill.event("a", "failed")["stage"]
    prefill.event("a", "released")
    assert decode.call("crc", blocks=ids) == others, "bytes of an attempt that was over landed in blocks of others"
    # And whoever stood still is a peer like others again.
    prefill.call("fill", blocks=[7], seed=4)
    open_pair(prefill, decode, "c", [103])
    send(prefill, "c", [(0, 7)])
    prefill.call("finish_send", attempt="c", tokens=40)
    assert prefill.event("c", "sent", "failed")["event"] == "sent"
    assert decode.call("crc", blocks=[103]) == prefill.call("crc", blocks=[7])
    assert decode.call("crc", blocks=ids) == others
    decode.call("cancel", attempt="c")
    open_pair(prefill, decode, "d", [104])
    prefill.signal(signal.SIGSTOP)
    decode.call("cancel", attempt="d")
    decode.event("d", "drained")
    assert open_pair(well, decode, "e", [105])["session"] not in (first, second)


def test_a_stopped_decode_quarantines_prefill_until_it_is_gone(start_engine: Start) -> None:
    prefill, decode = start_engine("direct", timeout=1.0), start_engine("direct", timeout=1.0)
    open_pair(prefill, decode, "a", list(range(1, 60)))
    decode.signal(signal.SIGSTOP)
    send(prefill, "a", [(i, i + 1) for i in range(59)])
    prefill.call("finish_send", attempt="a", tokens=40)
    assert prefill.event("a", "failed")["stage"] in ("sending", "computing")
    released = prefill.event("a", "released")
    if not released["drained"]:
        assert not prefill.call("is_drained", attempt="a")
        decode.kill()
        prefill.event("a", "drained")
    assert prefill.call("is_drained", attempt="a")


def test_many_descriptors_in_one_prompt(start_engine: Start) -> None:
    count = 3000
    prefill = start_engine("direct", blocks=count * 2 + 2, block_bytes=4096)
    decode = start_engine("direct", blocks=count * 2 + 2, block_bytes=4096)
    theirs = [2 * i + 1 for i in range(count)]
    mine = [2 * (count - i) for i in range(count)]
    prefill.call("fill", blocks=mine, seed=1)
    open_pair(prefill, decode, "a", theirs)
    send(prefill, "a", list(enumerate(mine)))
    prefill.call("finish_send", attempt="a", tokens=40)
    assert prefill.event("a", "sent", "failed")["event"] == "sent"
    decode.call("commit", attempt="a", ok=True)
    assert decode.event("a", "received", "failed")["event"] == "received"
    assert decode.call("crc", blocks=theirs) == prefill.call("crc", blocks=mine)


def test_runs_are_adjacent_on_both_sides() -> None:
    memory = KvRegion(base=1000, num_blocks=9, block_bytes=10, block_stride=10, layout_digest="L")

    def piece(block: int, target: int) -> Piece:
        return Piece(block_id=block, key="k", nbytes=10, remote_address=target)

    pieces = [piece(4, 540), piece(1, 510), piece(2, 520), piece(3, 600), piece(5, 550)]
    assert merge_runs(pieces, memory, 1000) == [Run(1010, 510, 20), Run(1030, 600, 10), Run(1040, 540, 20)]
    assert len(merge_runs([piece(i, 10 * i) for i in range(9)], memory, 30)) == 3
    assert len(merge_runs([piece(1, 10), piece(2, 20)], memory, 5)) == 2
    padded = KvRegion(base=0, num_blocks=9, block_bytes=10, block_stride=16, layout_digest="L")
    assert len(merge_runs([piece(1, 16), piece(2, 32)], padded, 1000)) == 2


@pytest.mark.parametrize(
    ("asked", "device", "rdma", "nvlink", "expected"),
    [
        ("auto", "cpu", [], False, "tcp"),
        ("auto", "cpu", ["mlx5_0"], False, "rdma"),
        ("auto", "cuda:0", ["mlx5_0"], True, "rdma"),
        ("auto", "cuda:0", [], True, "nvlink"),
        ("auto", "cuda:0", ["mlx5_0"], False, "rdma"),
        ("tcp", "cpu", ["mlx5_0"], False, "tcp"),
        ("rdma", "cpu", [], False, "no RDMA device"),
        ("nvlink", "cpu", [], True, "not on a GPU"),
        ("nvlink", "cuda:0", ["mlx5_0"], False, "nvlink"),
        ("auto", "cuda:0", [], False, "allow-tcp"),
        ("ib", "cpu", [], False, "unknown"),
    ],
)
def test_transports_are_chosen_or_refused_by_name(
    asked: str, device: str, rdma: list[str], nvlink: bool, expected: str
) -> None:
    if expected in ("tcp", "rdma", "nvlink"):
        chosen, _ = choose_transport(asked, "deny", device=device, rdma_devices=rdma, nvlink=nvlink)
        assert chosen == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            choose_transport(asked, "deny", device=device, rdma_devices=rdma, nvlink=nvlink)


@pytest.mark.parametrize("nvlink", [False, True])
def test_auto_may_settle_on_tcp_when_allowed(nvlink: bool) -> None:
    """Also beside another GPU: the peer may be in another host, which NVLink does not reach."""
    chosen = choose_transport("auto", "allow-tcp", device="cuda:0", rdma_devices=[], nvlink=nvlink)
    assert chosen == ("tcp", "tcp")


def test_tcp_settings_keep_writes_acknowledged() -> None:
    env = transport_environment("tcp", "10.0.0.1", 30.0)
    assert env["MC_TCP_PROTO"] == "2" and env["MC_FORCE_TCP"] == "1"
    assert env["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] == env["MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER"] == "65535"
    assert "MC_USE_IPV6" not in env
    assert "MC_FORCE_TCP" not in transport_environment("rdma", "fd00::1", 30.0)


def test_record_slots_are_finite_and_cleared() -> None:
    slots = RecordSlots(2)
    first = slots.take()
    slots.write(first, b"x" * SLOT_BYTES)
    slots.take()
    with pytest.raises(Overloaded, match="all 2"):
        slots.take()
    slots.give(first)
    assert slots.read(slots.take())[:12] == bytes(12)
    with pytest.raises(ValueError, match="does not fit"):
        slots.write(first, b"x" * (SLOT_BYTES + 1))
