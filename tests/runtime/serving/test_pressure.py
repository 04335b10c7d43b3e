"""When a process refuses for want of memory: levels never flap, and nobody is refused for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.serving.pressure import (
    CRITICAL_FROM,
    HYSTERESIS,
    STEP_S,
    TIGHT_FROM,
    USUAL,
    Level,
    Pressure,
    Use,
)

MIB = 1 << 20
GIB = 1 << 30


def alone(mine: int, limit: int = GIB) -> Use:
    return Use(mine, mine, limit)


def test_levels_are_shares_of_what_was_left_at_the_start() -> None:
    pressure = Pressure(alone(200 * MIB))
    room = GIB - 200 * MIB - USUAL
    at = lambda share: alone(200 * MIB + USUAL + int(room * share) + 1)  # noqa: E731
    found = [pressure.look(at(share), idle=False) for share in (0.1, 0.79, 0.80, 0.89, 0.90, 0.99)]
    assert [level.name for level in found] == ["CALM", "CALM", "TIGHT", "TIGHT", "CRITICAL", "CRITICAL"]


@pytest.mark.parametrize("share", [0.5, 0.88, 0.97, 0.999])
def test_an_engine_that_fills_its_limit_at_the_start_refuses_nobody_for_that(share: float) -> None:
    start = alone(int(GIB * share))
    pressure = Pressure(start)
    for idle in (True, False, False):
        assert pressure.look(start, idle=idle) is Level.CALM
    assert pressure.look(start._replace(mine=start.mine + 2 * MIB, used=start.used + 2 * MIB), idle=False) is Level.CALM


def test_a_pool_that_is_filled_by_and_by_is_no_request() -> None:
    pool = 400 * MIB
    promised, bare = Pressure(alone(100 * MIB), reserved=pool), Pressure(alone(100 * MIB))
    full = alone(100 * MIB + pool + 350 * MIB)
    assert promised.look(full, idle=False) is Level.CALM
    assert bare.look(full, idle=False) is Level.TIGHT


def test_a_promise_of_more_than_there_is_leaves_the_guard_awake() -> None:
    pressure = Pressure(alone(100 * MIB), reserved=10 * GIB)
    assert pressure.look(alone(GIB - 4 * MIB), idle=False) is Level.CRITICAL


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_a_pool_of_most_that_is_free_is_no_reason_when_it_is_full(share: float) -> None:
    start = alone(2 * GIB, 16 * GIB)
    pool = int(14 * GIB * share)
    full = alone(2 * GIB + min(pool, 13 * GIB), 16 * GIB)
    assert Pressure(start, reserved=pool).look(full, idle=False) is Level.CALM


def test_others_in_the_same_group_are_no_reason_while_there_is_room() -> None:
    """As processes of `isthmus up` in one container: an engine that starts later takes half of it."""
    pressure = Pressure(Use(100 * MIB, 200 * MIB, GIB))
    assert pressure.look(Use(120 * MIB, 900 * MIB, GIB), idle=False) is Level.CALM
    assert pressure.look(Use(320 * MIB, 1000 * MIB, GIB), idle=False) >= Level.TIGHT


def test_what_stays_when_no_request_is_there_is_nobodys() -> None:
    pressure = Pressure(alone(100 * MIB))
    assert pressure.look(alone(1000 * MIB), idle=False) is Level.CRITICAL
    assert pressure.look(alone(1000 * MIB), idle=True) is Level.CALM
    assert pressure.look(alone(1001 * MIB), idle=False) is Level.CALM
    # It came back later: then there is room again.
    assert pressure.look(alone(100 * MIB), idle=True) is Level.CALM
    assert pressure.look(alone(1001 * MIB), idle=False) is Level.CRITICAL


def test_what_came_back_after_an_idle_look_counts_again() -> None:
    """Or who pushes it once, and waits until it is idle, has the guard asleep for as long as somebody is there."""
    pressure, fresh = Pressure(alone(150 * MIB)), Pressure(alone(150 * MIB))
    pressure.look(alone(960 * MIB), idle=False)
    pressure.look(alone(960 * MIB), idle=True)
    pressure.look(alone(200 * MIB), idle=False)
    for mebibytes in (900, 945, 1000):
        found = pressure.look(alone(mebibytes * MIB), idle=False)
        # What stays is at most what it had then, which is below 16 MiB more than at the start or counts as that.
        assert found >= fresh.look(alone((mebibytes - 50) * MIB), idle=False)
    assert found is Level.CRITICAL


SIZES = st.integers(0, 2 * GIB)
LOOKS = st.lists(st.tuples(SIZES, SIZES, st.booleans()), max_size=40)


@given(start=st.tuples(SIZES, SIZES), reserved=SIZES, looks=LOOKS)
def test_a_level_rises_where_it_begins_and_falls_only_well_below(start, reserved, looks) -> None:
    pressure = Pressure(Use(*start, GIB), reserved)
    for mine, used, idle in looks:
        before = pressure.level
        level, share = pressure.look(Use(mine, used, GIB), idle=idle), pressure.share
        assert 0 <= share <= 1
        assert (level is Level.CRITICAL) >= (share >= CRITICAL_FROM) and (level >= Level.TIGHT) >= (share >= TIGHT_FROM)
        if level > before:
            assert share >= {Level.TIGHT: TIGHT_FROM, Level.CRITICAL: CRITICAL_FROM}[level]
        if level < before:
            assert share + HYSTERESIS < {Level.TIGHT: TIGHT_FROM, Level.CRITICAL: CRITICAL_FROM}[before]
        if idle:
            assert level is Level.CALM


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60))
def test_while_it_is_critical_one_has_to_end_after_each_pause(steps) -> None:
    pressure, now, last = Pressure(alone(0)), 0.0, float("-inf")
    for pause, critical in steps:
        now += pause
        pressure.look(alone(GIB if critical else 0), idle=False)
        ends = pressure.may_end(now)
        assert ends == (critical and now >= last + STEP_S)
        if ends:
            last = now
