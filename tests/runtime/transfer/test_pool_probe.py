"""What a pool may do to the values of a probe, and what is said of it. The pool is a stand-in for Mooncake's."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from isthmus_runtime.transfer import joining
from isthmus_runtime.transfer.pool_probe import KEYS, VALUE_BYTES, PoolFull, PoolProbe


class Pool:
    """A store that keeps what it is given, unless `harm` changes the codes or the values of a round."""

    def __init__(self, harm: Callable[[str, int], str] = lambda what, number: "") -> None:
        self.kept: dict[str, bytes] = {}
        self.rounds = 0
        self.registered: dict[int, int] = {}
        self._harm = harm

    def register_buffer(self, base: int, nbytes: int) -> int:
        self.registered[base] = nbytes
        return 0

    def unregister_buffer(self, base: int) -> None:
        del self.registered[base]

    def batch_put_from(self, keys: list[str], sources: list[int], sizes: list[int], config: object) -> list[int]:
        self.rounds += 1
        codes = []
        for key, source, size in zip(keys, sources, sizes, strict=True):
            harm = self._harm("put", self.rounds)
            codes.append({"full": -200, "gone": -800}.get(harm, 0))
            if not codes[-1]:
                self.kept[key] = ctypes.string_at(source, size)
        return codes

    def batch_get_into(self, keys: list[str], targets: list[int], sizes: list[int]) -> list[int]:
        codes = []
        for key, target, size in zip(keys, targets, sizes, strict=True):
            value = self.kept[key]
            harm = self._harm("get", self.rounds)
            if harm == "lost":
                codes.append(-704)
                continue
            if harm == "other":
                value = value[:-1] + bytes([value[-1] ^ 1])
            ctypes.memmove(target, value, size)
            codes.append(size)
        return codes

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        assert force, "the read just done holds a lease"
        return [0 if self.kept.pop(key, None) else -704 for key in keys]


class Clock:
    """Each look takes a millisecond."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def probe(pool: Pool, timeout_s: float = 1.0) -> tuple[float, str]:
    clock = Clock()
    made = PoolProbe(pool, clock, clock.wait)
    try:
        return made.until_it_works(None, clock.now + timeout_s)
    finally:
        made.close()
        assert not pool.kept and not pool.registered, "the probe leaves nothing"


def test_a_pool_that_works_has_a_speed() -> None:
    gbps, problem = probe(Pool())
    assert not problem
    assert gbps == pytest.approx(KEYS * VALUE_BYTES / 1e-3 / 1e9)


@pytest.mark.parametrize(
    ("what", "harm", "words"),
    [("put", "gone", "put gave [-800]"), ("get", "lost", "gave [-704]"), ("get", "other", "other bytes came back")],
)
def test_a_pool_that_does_not_is_tried_until_it_works_or_time_is_up(what: str, harm: str, words: str) -> None:
    pool = Pool(lambda op, number: harm if op == what and number < 4 else "")
    assert probe(pool)[1] == "" and pool.rounds == 4
    gbps, problem = probe(Pool(lambda op, number: harm if op == what else ""))
    assert gbps == 0 and words in problem


def test_a_full_pool_is_told_from_a_sick_one() -> None:
    with pytest.raises(PoolFull):
        probe(Pool(lambda op, number: "full" if op == "put" else ""))


def test_a_probe_that_was_given_up_is_known_to_run_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing Mooncake's client under a call ends the process by a signal (told to stop just after joining)."""
    stuck = threading.Event()

    class Slow(Pool):
        def batch_put_from(self, keys: list[str], sources: list[int], sizes: list[int], config: object) -> list[int]:
            if self.rounds:  # the second round goes to the segments of others
                assert stuck.wait(60)
            return super().batch_put_from(keys, sources, sizes, config)

    class Native:
        class ReplicateConfig:
            replica_num = 0
            preferred_segment = ""

    monkeypatch.setattr(joining, "REACH_S", 0.05)
    gbps, over = joining._probed(Native, Slow(), "own", "master:1", 30.0, time.monotonic)
    assert gbps > 0 and not over.is_set()
    stuck.set()
    assert over.wait(60)


def test_no_call_runs_after_a_probe_that_ended() -> None:
    class Native:
        class ReplicateConfig:
            replica_num = 0
            preferred_segment = ""

    gbps, over = joining._probed(Native, Pool(), "own", "master:1", 30.0, time.monotonic)
    assert gbps > 0 and over.is_set()
