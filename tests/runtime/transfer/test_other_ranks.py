"""Direct mode between engines of several ranks: each rank's part of a block goes to its counterpart's pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from isthmus_runtime.errors import ConfigError
from isthmus_runtime.interfaces.transport import TransferResult
from isthmus_runtime.protocol.ticket import RankPool, Ticket
from isthmus_runtime.transfer.other_ranks import Joined, OtherRank, ask_all
from isthmus_runtime.transfer.rank_lines import Answer, Part, Told, channel
from isthmus_runtime.transfer.tickets import TicketSigner, claim

Start = Callable[..., Any]
WAIT_S = 30.0
MINE, THEIRS = [11, 12, 13, 30, 31], [5, 6, 7, 40, 2]
BLOCK = 65536


def open_pair(prefill: Any, decode: Any, attempt: str) -> dict[str, Any]:
    hello = prefill.hello
    ticket = decode.call(
        "open_receive",
        attempt=attempt,
        blocks=[[i, block, f"k{attempt}{i}"] for i, block in enumerate(THEIRS)],
        tokens=40,
        url=hello["url"],
        epoch=hello["epoch"],
    )
    prefill.call("open_send", attempt=attempt, ticket=ticket)
    return dict(ticket)


def send(prefill: Any, attempt: str, first: int = 0, last: int = len(MINE)) -> None:
    blocks = [[i, block, f"k{attempt}{i}"] for i, block in enumerate(MINE)]
    prefill.call("send_blocks", attempt=attempt, blocks=blocks[first:last])


@pytest.mark.slow
def test_parts_of_all_ranks_arrive_and_nothing_else_is_written(start_engine: Start) -> None:
    prefill, decode = start_engine("direct", "crc", "ranks=3"), start_engine("direct", "crc", "ranks=3")
    prefill.call("fill", blocks=MINE, seed=3)
    untouched = decode.call("crc", blocks=[0, 1, 3, 4, 8])
    for attempt in ("a", "b"):
        ticket = open_pair(prefill, decode, attempt)
        assert len({ticket["session"], *(pool["session"] for pool in ticket["ranks"])}) == 3
        send(prefill, attempt, 0, 2)
        send(prefill, attempt, 2)
        prefill.call("finish_send", attempt=attempt, tokens=40)
        sent = prefill.event(attempt, "sent", "failed")
        assert sent["event"] == "sent", sent
        assert sent["sent_bytes"] == 3 * len(MINE) * BLOCK
        decode.call("commit", attempt=attempt, ok=True)
        received = decode.event(attempt, "received", "failed")
        assert received["event"] == "received", received
        crcs = decode.call("crc", blocks=THEIRS)
        assert crcs == prefill.call("crc", blocks=MINE) and len(set(crcs)) == len(crcs)
        for engine in (prefill, decode):
            engine.event(attempt, "released")
            assert engine.call("live") == 0
    assert decode.call("crc", blocks=[0, 1, 3, 4, 8]) == untouched


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_checksum_covers_every_rank(rank: int, start_engine: Start) -> None:
    prefill, decode = start_engine("direct", "crc", "ranks=3"), start_engine("direct", "crc", "ranks=3")
    prefill.call("fill", blocks=MINE, seed=3)
    open_pair(prefill, decode, "a")
    send(prefill, "a")
    prefill.call("finish_send", attempt="a", tokens=40)
    assert prefill.event("a", "sent", "failed")["event"] == "sent"
    decode.call("fill", blocks=THEIRS[1:2], seed=77, ranks=[rank])
    decode.call("commit", attempt="a", ok=True)
    failed = decode.event("a", "received", "failed")
    assert failed["event"] == "failed" and "CRC-32" in failed["reason"], failed


@pytest.mark.slow
@pytest.mark.parametrize(("mine", "theirs"), [("ranks=2", "ranks=3"), ("ranks=2", ""), ("", "ranks=2")])
def test_engines_of_other_numbers_of_ranks_are_refused(mine: str, theirs: str, start_engine: Start) -> None:
    """Their layouts differ, too; this is what is left where a digest does not say so."""
    prefill, decode = start_engine("direct", mine), start_engine("direct", theirs)
    open_pair(prefill, decode, "a")
    send(prefill, "a")
    failed = prefill.event("a", "failed")
    assert "give both the same --tensor-parallel-size" in failed["reason"], failed


@pytest.mark.slow
def test_of_a_rank_that_is_lost_nothing_is_believed(start_engine: Start) -> None:
    """Its writes may go on until its process has ended, which takes the engine with it."""
    prefill, decode = start_engine("direct", "ranks=2"), start_engine("direct", "ranks=2")
    prefill.call("fill", blocks=MINE, seed=3)
    open_pair(prefill, decode, "a")
    send(prefill, "a", 0, 2)
    prefill.call("break rank", rank=1)
    assert prefill.call("rank ended", rank=1)
    send(prefill, "a", 2)
    failed = prefill.event("a", "failed")
    assert "rank 1" in failed["reason"] and "lost" in failed["reason"], failed
    assert not prefill.event("a", "released")["drained"]
    assert not prefill.call("is_drained", attempt="a")
    prefill.process.kill()
    decode.call("commit", attempt="a", ok=False, stage="sending")
    assert decode.event("a", "released", "drained")


@pytest.mark.slow
def test_all_ranks_close_with_the_first(start_engine: Start) -> None:
    """Each says that nothing of it moves, and none takes the end of its channel for a loss."""
    assert start_engine("direct", "ranks=3").call("close") == [True, True]


def test_what_a_lost_rank_is_asked_is_answered_at_once() -> None:
    ours, theirs = channel()
    theirs.sendall(b'{"session":"127.0.0.1:1","base":4096,"transport":"tcp"}\n')
    rank = OtherRank(1, ours)
    assert rank.prepared(WAIT_S).pool == RankPool(session="127.0.0.1:1", pool_base=4096)
    answers: list[Answer] = []
    came = threading.Semaphore(0)

    def then(answer: Answer) -> None:
        answers.append(answer)
        came.release()

    rank.moving("before", then)
    theirs.close()
    assert came.acquire(timeout=WAIT_S)
    rank.moving("after", then)
    assert came.acquire(timeout=WAIT_S)
    assert [(answer.moving, answer.ok) for answer in answers] == [(True, False)] * 2
    results: list[TransferResult] = []
    rank.write(Part(attempt="a", session="127.0.0.1:1", greeting="", epoch="e", claim=""), results.append)
    assert not results[0].ok and not results[0].settled and results[0].reason.startswith("rank 1: is lost")


def test_a_rank_that_takes_no_message_is_lost() -> None:
    """It stands still: whoever speaks to it is not held up for long, and hears of it."""
    ours, theirs = channel()
    theirs.sendall(b'{"session":"127.0.0.1:1"}\n')
    rank = OtherRank(1, ours)
    rank.prepared(WAIT_S)
    results: list[TransferResult] = []
    ended = threading.Event()

    def done(result: TransferResult) -> None:
        results.append(result)
        ended.set()

    many = tuple((i * 4096, i * 4096, 4096) for i in range(100_000))  # more than a socket holds
    rank.write(Part(attempt="a", session="127.0.0.1:1", greeting="", epoch="e", claim="", runs=many), done)
    assert ended.wait(WAIT_S)
    assert not results[0].ok and "takes no message" in results[0].reason
    theirs.close()


def test_a_rank_that_cannot_move_kv_says_why() -> None:
    ours, theirs = channel()
    theirs.sendall(b'{"problem":"--transfer-transport rdma: no RDMA device"}\n')
    with pytest.raises(ConfigError, match="rank 2: --transfer-transport rdma: no RDMA device"):
        OtherRank(2, ours).prepared(WAIT_S)
    theirs.close()
    ours, theirs = channel()
    theirs.close()
    with pytest.raises(ConfigError, match="rank 2: it ended before"):
        OtherRank(2, ours).prepared(WAIT_S)
    ours, theirs = channel()
    with pytest.raises(ConfigError, match=r"rank 2 has not registered its KV pool within 0\.05 s"):
        OtherRank(2, ours).prepared(0.05)
    theirs.close()
    assert Told(session="s:1", base=7, mapping="").pool == RankPool(session="s:1", pool_base=7)


@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_parts_are_one_result(failing: int | None) -> None:
    """Told once: at the first failure as unsettled, for others may still move, or when all have ended."""
    told: list[TransferResult] = []
    joined = Joined(3, told.append)
    for number in range(3):
        fails = number == failing
        joined.ended(TransferResult(ok=not fails, moved_bytes=10, reason="why" if fails else ""))
        assert len(told) == (1 if fails or number == 2 or told else 0)
    if failing is None:
        assert told == [TransferResult(ok=True, moved_bytes=30)]
    else:
        assert told == [TransferResult(ok=False, moved_bytes=10 * (failing + 1), reason="why", settled=failing == 2)]


def test_a_question_to_no_rank_is_answered_at_once() -> None:
    answers: list[list[Answer]] = []
    ask_all((), lambda rank, then: rank.moving("a", then), answers.append)
    assert answers == [[]]


def test_a_ticket_covers_the_pools_of_all_ranks() -> None:
    """Whoever changes a rank's pool on the way shows another claim than was signed."""
    plain = Ticket(mode="direct", attempt="a", layout_digest="d", greeting="127.0.0.1:1", epoch="e")
    assert "ranks" not in plain.model_dump(), "engines of an older version know no such field"
    pools = (RankPool(session="127.0.0.1:2", pool_base=1), RankPool(session="127.0.0.1:3", pool_base=2))
    signer = TicketSigner()
    ticket = signer.sign(plain.model_copy(update={"ranks": pools}), 10.0)
    assert Ticket.model_validate_json(ticket.model_dump_json()) == ticket
    assert signer.attempt_of(claim(ticket), 1.0) == "a"
    moved = ticket.model_copy(update={"ranks": (pools[0], RankPool(session="127.0.0.1:9", pool_base=2))})
    with pytest.raises(ValueError, match="not as this process signed it"):
        signer.attempt_of(claim(moved), 1.0)
