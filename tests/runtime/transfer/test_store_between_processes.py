"""Store mode against a real mooncake_master, with prefill and decode in processes of their own."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus_runtime.config import StoreConfig
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.interfaces.transport import KvRegion
from isthmus_runtime.kv.keys import pool_secret
from isthmus_runtime.transfer.factory import store_secret
from isthmus_runtime.transfer.pool_codes import explain
from isthmus_runtime.transfer.pool_moves import CHUNK_KEYS
from isthmus_runtime.transfer.scoped_keys import is_scoped
from isthmus_runtime.transfer.store import StoreTransfer

pytestmark = pytest.mark.slow  # starts processes, and waits for deadlines to pass

Start = Callable[..., Any]
SLOW_S = 60.0
AT_ONCE_S = SLOW_S / 2
"""What is noticed by itself comes long before the timeout, SLOW_S, for which all else waits."""
MINE, THEIRS = [7, 8, 9, 20], [3, 30, 31, 5]


def keys_of(attempt: str, prompt: str = "p") -> list[str]:
    return [f"{prompt}:{i}" for i in range(3)] + [f"{prompt}:3:partial:5:r:{attempt}"]


def rows(keys: list[str], ids: list[int]) -> list[list[Any]]:
    return [[i, b, k] for i, (b, k) in enumerate(zip(ids, keys, strict=True))]


def open_pair(prefill: Any, decode: Any, attempt: str, keys: list[str], *, mine: list[int], theirs: list[int]) -> None:
    hello = prefill.hello
    ticket = decode.call(
        "open_receive",
        attempt=attempt,
        blocks=rows(keys, theirs),
        tokens=53,
        url=hello["url"],
        epoch=hello["epoch"],
    )
    prefill.call("open_send", attempt=attempt, ticket=ticket)
    prefill.call("send_blocks", attempt=attempt, blocks=rows(keys, mine))


def transfer(
    prefill: Any,
    decode: Any,
    attempt: str,
    keys: list[str] | None = None,
    *,
    mine: list[int] = MINE,
    theirs: list[int] = THEIRS,
) -> dict[str, Any]:
    """One attempt from start to result, on decode's side if prefill succeeded."""
    keys = keys or keys_of(attempt)
    open_pair(prefill, decode, attempt, keys, mine=mine, theirs=theirs[: len(mine)])
    prefill.call("finish_send", attempt=attempt, tokens=53)
    sent = prefill.event(attempt, "sent", "failed")
    decode.call("commit", attempt=attempt, ok=sent["event"] == "sent", stage=sent["stage"])
    got: dict[str, Any] = decode.event(attempt, "received", "failed")
    return sent if sent["event"] == "failed" else got


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"


def test_full_blocks_stay_and_what_belongs_to_the_attempt_is_removed(start_engine: Start, master: Any) -> None:
    prefill = start_engine("store", master=master.address)
    decode = start_engine("store", master=master.address)
    prefill.call("fill", blocks=MINE, seed=1)
    got = transfer(prefill, decode, "a")
    assert got["event"] == "received" and got["first_token"] == 11, got
    assert decode.call("crc", blocks=THEIRS) == prefill.call("crc", blocks=MINE)
    scoped = [keys_of("a")[3], "record::a"]
    wait_until(lambda: not any(decode.call("exist", keys=scoped)), "scoped keys are removed")
    assert decode.call("exist", keys=keys_of("a")[:3]) == [1, 1, 1]
    # A second attempt of the same prompt stores only its own tail, and never sees the first one's.
    prefill.call("fill", blocks=[20], seed=9)
    assert transfer(prefill, decode, "b")["event"] == "received"
    assert decode.call("crc", blocks=THEIRS) == prefill.call("crc", blocks=MINE)
    for engine in (prefill, decode):
        engine.event("b", "released")
        assert engine.call("live") == 0


def fetch(engine: Any, name: str, keys: list[str], blocks: list[int], **more: Any) -> dict[str, Any]:
    engine.call("fetch", attempt=name, blocks=rows(keys, blocks), **more)
    got: dict[str, Any] = engine.event(name, "fetched")
    return got


def test_another_engine_fetches_the_blocks_that_one_has_put(start_engine: Start, master: Any) -> None:
    prefill, decode, other = (start_engine("store", master=master.address) for _ in range(3))
    prefill.call("fill", blocks=MINE, seed=1)
    assert transfer(prefill, decode, "a")["event"] == "received"
    other.call("fill", blocks=THEIRS, seed=9)
    before = other.call("crc", blocks=THEIRS)
    keys = ["p:0", "p:1", "nobody:2", "p:2"]
    got = fetch(other, "f", keys, THEIRS)
    assert (got["blocks"], got["problem"]) == (2, ""), "what lies behind a gap is of no use"
    assert other.event("f", "released")["drained"]
    right = prefill.call("crc", blocks=MINE)
    assert other.call("crc", blocks=THEIRS) == right[:2] + before[2:]
    assert fetch(other, "all", ["p:0", "p:1", "p:2"], THEIRS[:3])["blocks"] == 3
    assert other.call("crc", blocks=THEIRS[:3]) == right[:3]
    assert fetch(other, "none", ["nobody:0"], THEIRS[:1])["blocks"] == 0
    for name in ("all", "none"):
        assert other.event(name, "released")["drained"]
    assert other.call("live") == 0 and other.call("exist", keys=keys) == [1, 1, 0, 1]


def test_more_blocks_than_go_into_one_call_are_fetched(start_engine: Start, master: Any) -> None:
    count = 2 * CHUNK_KEYS + 5
    size = {"blocks": 2 * count, "block_bytes": 1024}
    prefill, decode, other = (start_engine("store", master=master.address, **size) for _ in range(3))
    mine, theirs = list(range(1, count + 1)), list(range(count, 2 * count))
    prefill.call("fill", blocks=mine, seed=3)
    keys = [f"long:{i}" for i in range(count)]
    assert transfer(prefill, decode, "a", keys, mine=mine, theirs=theirs)["event"] == "received"
    assert fetch(other, "f", keys, mine)["blocks"] == count
    assert other.call("crc", blocks=mine) == prefill.call("crc", blocks=mine)
    assert other.call("remove", keys=keys[CHUNK_KEYS + 3 : CHUNK_KEYS + 4]) == [0]
    assert fetch(other, "g", keys, mine)["blocks"] == CHUNK_KEYS + 3


def test_a_damaged_block_is_not_taken_and_goes(start_engine: Start, master: Any) -> None:
    prefill, decode, other = (start_engine("store", master=master.address) for _ in range(3))
    prefill.call("fill", blocks=MINE, seed=1)
    assert transfer(prefill, decode, "a")["event"] == "received"
    assert other.call("damage", key="p:1") == [0]
    got = fetch(other, "f", ["p:0", "p:1", "p:2"], THEIRS[:3])
    assert got["blocks"] == 0 and "p:1 is damaged" in got["problem"] and not got["given_up"]
    assert other.event("f", "released")["drained"]
    assert other.call("exist", keys=["p:0", "p:1", "p:2"]) == [1, 0, 1]


def test_a_fetch_ends_with_the_master_and_when_nobody_wants_it(start_engine: Start, master: Any) -> None:
    prefill, decode, other = (start_engine("store", master=master.address) for _ in range(3))
    prefill.call("fill", blocks=MINE, seed=1)
    assert transfer(prefill, decode, "a")["event"] == "received"
    master.process.send_signal(signal.SIGSTOP)
    other.call("fetch", attempt="f", blocks=rows(["p:0", "p:1"], THEIRS[:2]), deadline=SLOW_S)
    other.call("cancel", attempt="f")
    got = other.event("f", "fetched")
    assert got["blocks"] == 0 and got["given_up"], got
    master.process.send_signal(signal.SIGCONT)
    wait_until(lambda: other.call("live") == 0, "the fetch has drained")
    master.process.kill()
    began = time.monotonic()
    got = fetch(other, "g", ["p:0", "p:1"], THEIRS[:2], deadline=SLOW_S)
    assert got["problem"] and not got["given_up"], got
    assert time.monotonic() - began < AT_ONCE_S
    wait_until(lambda: other.call("live") == 0, "the fetch has drained", SLOW_S)


def test_an_engine_is_ready_when_the_pool_gave_back_what_was_put(start_engine: Start, master: Any) -> None:
    for _ in range(2):
        assert start_engine("store", master=master.address).hello["gbps"] > 0
    assert master.keys() == [], "what a probe puts is removed"


def test_prompts_that_begin_alike_and_arrive_together_all_move(start_engine: Start, master: Any) -> None:
    """A put on a key that another process is just putting returns at once, and the key is not there yet."""
    size, count = 65536, 24
    prefills = [start_engine("store", master=master.address, block_bytes=size, timeout=5.0) for _ in range(2)]
    decode = start_engine("store", master=master.address, block_bytes=size)
    for prefill in prefills:
        prefill.call("fill", blocks=list(range(1, count + 1)), seed=5)
    for number in range(15):
        blocks = [[i, i + 1, f"alike{number}:{i}"] for i in range(count)]
        for which, prefill in enumerate(prefills):
            attempt = f"{number}-{which}"
            theirs = [[i, 1 + i + which * count, key] for i, _, key in blocks]
            hello = prefill.hello
            ticket = decode.call(
                "open_receive", attempt=attempt, blocks=theirs, tokens=53, url=hello["url"], epoch=hello["epoch"]
            )
            prefill.call("open_send", attempt=attempt, ticket=ticket)
        for which, prefill in enumerate(prefills):
            prefill.call("send_blocks", attempt=f"{number}-{which}", blocks=blocks)
            prefill.call("finish_send", attempt=f"{number}-{which}", tokens=53)
        for which, prefill in enumerate(prefills):
            attempt = f"{number}-{which}"
            sent = prefill.event(attempt, "sent", "failed")
            assert sent["event"] == "sent", sent
            decode.call("commit", attempt=attempt, ok=True)
            got = decode.event(attempt, "received", "failed")
            assert got["event"] == "received", got


def test_a_pod_that_died_does_not_disturb_the_others(start_engine: Start, master: Any) -> None:
    """The pool goes on offering its segment for a while, and puts there fail."""
    prefill = start_engine("store", master=master.address)
    decode = start_engine("store", master=master.address)
    others = [start_engine("store", master=master.address) for _ in range(2)]
    assert all(engine.hello["ready"] for engine in (prefill, decode, *others))
    for other in others:
        other.kill()
    for number in range(8):
        attempt = f"a{number}"
        got = transfer(prefill, decode, attempt, keys_of(attempt, attempt))
        assert got["event"] == "received", got


def test_a_missing_block_or_record_fails_and_names_it(start_engine: Start, master: Any) -> None:
    prefill = start_engine("store", master=master.address)
    decode = start_engine("store", master=master.address)
    for attempt, lost in (("a", "p:1"), ("b", "record::b"), ("c", keys_of("c")[3])):
        open_pair(prefill, decode, attempt, keys_of(attempt), mine=MINE, theirs=THEIRS)
        prefill.call("finish_send", attempt=attempt, tokens=53)
        assert prefill.event(attempt, "sent", "failed")["event"] == "sent"
        assert prefill.call("remove", keys=[lost]) == [0]
        decode.call("commit", attempt=attempt, ok=True)
        failed = decode.event(attempt, "received", "failed")
        assert failed["event"] == "failed" and "not in the pool (-704)" in failed["reason"], failed
        assert decode.event(attempt, "released")["drained"]
        scoped = [keys_of(attempt)[3], f"record::{attempt}"]
        wait_until(lambda keys=scoped: not any(decode.call("exist", keys=keys)), "scoped keys are removed")


def test_decode_that_gives_up_removes_the_tail(start_engine: Start, master: Any) -> None:
    prefill = start_engine("store", master=master.address)
    decode = start_engine("store", master=master.address)
    open_pair(prefill, decode, "a", keys_of("a"), mine=MINE, theirs=THEIRS)
    prefill.call("finish_send", attempt="a", tokens=53)
    prefill.event("a", "sent")
    decode.call("cancel", attempt="a")
    assert decode.event("a", "released")["drained"]
    wait_until(lambda: not any(decode.call("exist", keys=[keys_of("a")[3], "record::a"])), "scoped keys are removed")


def test_a_shared_block_that_somebody_else_wrote_is_no_failure(start_engine: Start, master: Any) -> None:
    """KV computed in another batch differs in its last bits, and a put on an existing key keeps the value there."""
    first = start_engine("store", "crc", master=master.address)
    second = start_engine("store", "crc", master=master.address)
    decode = start_engine("store", "crc", master=master.address)
    first.call("fill", blocks=MINE, seed=1)
    second.call("fill", blocks=MINE, seed=2)
    assert transfer(first, decode, "a")["event"] == "received"
    got = transfer(second, decode, "b")
    assert got["event"] == "received", got
    theirs = decode.call("crc", blocks=THEIRS)
    assert theirs[:3] == first.call("crc", blocks=MINE)[:3], "shared blocks are the first writer's"
    assert theirs[3] == second.call("crc", blocks=MINE)[3], "the tail belongs to the attempt"
    assert decode.call("exist", keys=keys_of("b")[:3]) == [1, 1, 1]


@pytest.mark.parametrize("secret", ["", "of this service"])
def test_a_damaged_block_is_found_and_it_alone_is_removed(start_engine: Start, master: Any, secret: str) -> None:
    flags = (f"secret={secret}",) if secret else ()
    prefill = start_engine("store", *flags, master=master.address)
    decode = start_engine("store", *flags, master=master.address)
    prefill.call("fill", blocks=MINE, seed=1)
    assert transfer(prefill, decode, "a")["event"] == "received"
    keys = keys_of("b")
    assert prefill.call("damage", key="p:1") == [0]
    failed = transfer(prefill, decode, "b")
    assert failed["event"] == "failed" and failed["stage"] == "receiving", failed
    assert "block p:1 is damaged in the pool" in failed["reason"], failed
    wait_until(lambda: not any(decode.call("exist", keys=[keys[1]])), "the damaged value is removed")
    assert decode.call("exist", keys=[keys[0], keys[2]]) == [1, 1], "the others stay"
    assert transfer(prefill, decode, "c")["event"] == "received"
    assert decode.call("crc", blocks=THEIRS) == prefill.call("crc", blocks=MINE)


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_value_of_another_size_is_damaged_too(start_engine: Start, master: Any, size: int) -> None:
    """It stayed under its name, and every later request with that prefix failed."""
    prefill = start_engine("store", master=master.address)
    decode = start_engine("store", master=master.address)
    prefill.call("fill", blocks=MINE, seed=1)
    assert transfer(prefill, decode, "a")["event"] == "received"
    assert prefill.call("damage", key="p:1", size=size) == [0]
    failed = transfer(prefill, decode, "b")
    assert failed["event"] == "failed" and "block p:1 is damaged in the pool" in failed["reason"], failed
    wait_until(lambda: not any(decode.call("exist", keys=[keys_of("b")[1]])), "the damaged value is removed")
    assert transfer(prefill, decode, "c")["event"] == "received"
    assert decode.call("crc", blocks=THEIRS) == prefill.call("crc", blocks=MINE)


def test_a_damaged_record_is_found(start_engine: Start, master: Any) -> None:
    prefill = start_engine("store", master=master.address)
    decode = start_engine("store", master=master.address)
    open_pair(prefill, decode, "a", keys_of("a"), mine=MINE, theirs=THEIRS)
    prefill.call("finish_send", attempt="a", tokens=53)
    assert prefill.event("a", "sent", "failed")["event"] == "sent"
    assert prefill.call("damage", key="record::a") == [0]
    decode.call("commit", attempt="a", ok=True)
    failed = decode.event("a", "received", "failed")
    assert failed["event"] == "failed" and "the record of attempt a: it is damaged" in failed["reason"], failed


def test_services_with_different_secrets_share_nothing(start_engine: Start, master: Any) -> None:
    """Names in the pool tell nothing of the content, and another service's values are neither found nor taken."""
    prefill = start_engine("store", "secret=one", master=master.address)
    decode = start_engine("store", "secret=one", master=master.address)
    stranger = start_engine("store", "secret=two", master=master.address)
    prefill.call("fill", blocks=MINE, seed=1)
    assert transfer(prefill, decode, "a")["event"] == "received"
    assert decode.call("exist", keys=keys_of("a")[:3]) == [1, 1, 1]
    assert stranger.call("exist", keys=keys_of("a")[:3]) == [0, 0, 0]
    assert all(len(name) == 64 and ":" not in name for name in master.keys()), master.keys()  # noqa: SIM118
    stranger.call("fill", blocks=MINE, seed=2)
    assert transfer(stranger, decode, "b")["event"] == "failed", "a record that decode does not find"


def test_a_full_pool_fails_the_attempt_and_recovers(start_engine: Start, master: Any) -> None:
    size = 1 << 20
    prefill = start_engine("store", master=master.address, block_bytes=size, segment=16 << 20)
    decode = start_engine("store", master=master.address, block_bytes=size, segment=16 << 20)
    ids = list(range(1, 41))
    hello = prefill.hello
    keys = [f"big:{i}" for i in ids]
    ticket = decode.call(
        "open_receive", attempt="a", blocks=rows(keys, ids), tokens=53, url=hello["url"], epoch=hello["epoch"]
    )
    prefill.call("open_send", attempt="a", ticket=ticket)
    prefill.call("send_blocks", attempt="a", blocks=rows(keys, ids))
    failed = prefill.event("a", "failed")
    assert "no space (-200)" in failed["reason"] or "evicted at once" in failed["reason"], failed
    assert prefill.event("a", "released")["drained"]
    decode.call("commit", attempt="a", ok=False, stage=failed["stage"])
    assert decode.event("a", "released")["drained"]


@pytest.mark.slow
def test_blocks_are_not_evicted_between_put_and_read(start_engine: Start, master: Any) -> None:
    size = 1 << 20
    prefill = start_engine("store", master=master.address, block_bytes=size, segment=32 << 20)
    decode = start_engine("store", master=master.address, block_bytes=size, segment=32 << 20)
    prefill.call("fill", blocks=MINE, seed=4)
    open_pair(prefill, decode, "a", keys_of("a", "kept"), mine=MINE, theirs=THEIRS)
    prefill.call("finish_send", attempt="a", tokens=53)
    prefill.event("a", "sent")
    for n in range(30):  # others fill the pool twice over meanwhile
        keys = [f"other{n}:{i}" for i in range(4)]
        open_pair(prefill, decode, f"o{n}", keys, mine=[40, 41, 42, 43], theirs=[40, 41, 42, 43])
        decode.call("cancel", attempt=f"o{n}")
        prefill.call("cancel", attempt=f"o{n}")
        prefill.event(f"o{n}", "released")
    decode.call("commit", attempt="a", ok=True)
    got = decode.event("a", "received", "failed")
    assert got["event"] == "received", got
    assert decode.call("crc", blocks=THEIRS) == prefill.call("crc", blocks=MINE)


def test_the_owner_of_the_bytes_is_killed(start_engine: Start, master: Any) -> None:
    decode = start_engine("store", master=master.address, segment=16 << 20, block_bytes=1 << 20, timeout=SLOW_S)
    prefill = start_engine("store", master=master.address, segment=64 << 20, block_bytes=1 << 20, timeout=SLOW_S)
    ids = list(range(1, 31))  # 30 MiB: more than decode's own segment holds
    open_pair(prefill, decode, "a", [f"owned:{i}" for i in ids], mine=ids, theirs=ids)
    prefill.call("finish_send", attempt="a", tokens=53)
    assert prefill.event("a", "sent", "failed")["event"] == "sent"
    prefill.kill()
    decode.call("commit", attempt="a", ok=True)
    failed = decode.event("a", "received", "failed")
    assert failed["event"] == "failed", failed
    assert decode.event("a", "released")["at"] - failed["at"] < AT_ONCE_S


def test_a_dead_master_is_noticed_at_once_and_its_return_too(start_engine: Start, master: Any) -> None:
    prefill = start_engine("store", master=master.address, timeout=SLOW_S)
    decode = start_engine("store", master=master.address, timeout=SLOW_S)
    assert transfer(prefill, decode, "a")["event"] == "received"
    # One attempt is between prefill and decode when the master dies.
    open_pair(prefill, decode, "b", keys_of("b", "q"), mine=MINE, theirs=THEIRS)
    prefill.call("finish_send", attempt="b", tokens=53)
    prefill.event("b", "sent")
    master.kill()
    begun = time.monotonic()
    decode.call("commit", attempt="b", ok=True)
    failed = decode.event("b", "received", "failed")
    assert failed["event"] == "failed" and failed["at"] - begun < AT_ONCE_S, failed
    for n in range(6):
        attempt = f"c{n}"
        begun = time.monotonic()
        open_pair(prefill, decode, attempt, keys_of(attempt, "z"), mine=MINE, theirs=THEIRS)
        failed = prefill.event(attempt, "failed")
        assert failed["at"] - begun < AT_ONCE_S, failed
        assert "mooncake_master" in failed["reason"]
        prefill.event(attempt, "released")
        decode.call("cancel", attempt=attempt)
        decode.event(attempt, "released")
    master.restart()
    numbers = iter(range(1000))

    def works() -> bool:
        attempt = f"d{next(numbers)}"
        return transfer(prefill, decode, attempt, keys_of(attempt, attempt))["event"] == "received"

    wait_until(works, "transfers work again after the restart")
    # Whatever was given up inside a blocked call drains once the call returns.
    wait_until(lambda: prefill.call("live") == 0 and decode.call("live") == 0, "nothing stays behind")


def test_a_stopped_master_bounds_every_operation(start_engine: Start, master: Any) -> None:
    prefill = start_engine("store", master=master.address, timeout=1.0)
    decode = start_engine("store", master=master.address, timeout=1.0)
    assert prefill.hello["ready"] and decode.hello["ready"]
    master.process.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    open_pair(prefill, decode, "a", keys_of("a"), mine=MINE, theirs=THEIRS)
    prefill.call("finish_send", attempt="a", tokens=53)
    assert prefill.event("a", "sent", "failed")["event"] == "failed"
    released = prefill.event("a", "released")
    assert released["at"] - begun < 10.0, "Mooncake itself waits for longer"
    master.process.send_signal(signal.SIGCONT)
    if not released["drained"]:
        prefill.event("a", "drained")
    wait_until(lambda: prefill.call("live") == 0, "nothing stays behind")


def test_closing_under_a_call_that_does_not_end_is_bounded(start_engine: Start, master: Any) -> None:
    prefill = start_engine("store", master=master.address, timeout=1.0)
    decode = start_engine("store", master=master.address, timeout=1.0)
    assert prefill.hello["ready"] and decode.hello["ready"]
    master.process.send_signal(signal.SIGSTOP)
    try:
        for attempt in ("a", "b", "c", "d", "e"):
            open_pair(prefill, decode, attempt, keys_of(attempt, attempt), mine=MINE, theirs=THEIRS)
        begun = time.monotonic()
        prefill.call("close")
        assert time.monotonic() - begun < 15
    finally:
        master.process.send_signal(signal.SIGCONT)


def test_setup_without_a_master_is_refused_at_once_naming_it() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    store = StoreTransfer(host="127.0.0.1", master=address, segment_bytes=1 << 20)
    memory = KvRegion(base=4096, num_blocks=1, block_bytes=64, block_stride=64, layout_digest="L")
    with pytest.raises(ConfigError, match=f"--store-master {address}.*start mooncake_master"):
        store.prepare(memory, 5.0)


@pytest.mark.slow
def test_setup_against_a_silent_master_is_given_up(start_engine: Start) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen(64)
        engine = start_engine("store", master=f"127.0.0.1:{s.getsockname()[1]}")
        assert "failed" in engine.hello, engine.hello
        assert "--store-master" in engine.hello["failed"]
        assert engine.hello["seconds"] < 15


def test_a_segment_that_is_too_small_is_refused(start_engine: Start, master: Any) -> None:
    engine = start_engine("store", master=master.address, segment=1 << 20)
    assert "smallest segment is 16Mi" in engine.hello["failed"]


def test_a_secret_that_is_missing_or_short_is_refused(tmp_path: Path) -> None:
    assert store_secret(StoreConfig()) == b""
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match=r"--store-secret-file .*No such file"):
        store_secret(StoreConfig(secret_file=str(file)))
    file.write_text("too short\n")
    with pytest.raises(ConfigError, match="holds 9 bytes; give 16 or more"):
        store_secret(StoreConfig(secret_file=str(file)))
    file.write_text("sixteen bytes...\n")
    assert store_secret(StoreConfig(secret_file=str(file))) == pool_secret(b"sixteen bytes...")


def test_scoped_keys_are_told_from_shared_ones() -> None:
    from isthmus_runtime.kv.keys import full_block_keys, record_key, tail_key

    assert is_scoped(tail_key("L", b"p" * 32, 2, [1, 2], "r", "a", (0, 1)))
    assert is_scoped(record_key("", "a"))
    assert not is_scoped(*full_block_keys("L", [b"p" * 32], (0, 1)))


def test_codes_are_put_in_words() -> None:
    assert explain(-200) == "the pool has no space (-200)"
    assert explain(-1234) == "failed (-1234)"
