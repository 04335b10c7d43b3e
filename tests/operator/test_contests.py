"""Somebody who changes an object again and again is answered less and less often, and told of once."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from isthmus_operator.api.reasons import Reason
from isthmus_operator.plan.contests import FIRST_S, MANY, MOST_S, WITHIN_S, Contests, Name
from isthmus_operator.plan.events import contested, healed

KEY, OTHER = ("ns", "svc"), ("ns", "other")
D: Name = ("Deployment", "svc-decode")
S: Name = ("Service", "svc-decode")


def fight(period_s: float, seconds: float) -> tuple[list[float], list[Name], list[Name]]:
    """An HPA sets a number every `period_s`: when that was put right, and what was told."""
    contests, at, now = Contests(), [], 0.0
    single: list[Name] = []
    many: list[Name] = []
    changed = False
    while now < seconds:
        changed = True
        # We look after each of their changes, and when the pause is over.
        looks = [now + 0.05, contests.left_alone(KEY, now).get(D, 0.0)]
        for look in sorted(one for one in looks if now < one <= now + period_s):
            if changed and D not in contests.left_alone(KEY, look):
                told = contests.put_right(KEY, [D], look)
                at.append(look)
                single += told[0]
                many += told[1]
                changed = False
        now += period_s
    return at, single, many


def test_a_change_by_hand_is_put_right_at_once_however_often_in_a_day() -> None:
    contests = Contests()
    for hour in range(24):
        now = hour * 3600.0
        assert contests.put_right(KEY, [D, S], now) == ([D, S], [])
        assert contests.put_right(KEY, [D], now + 20) == ([D], [])
        assert contests.left_alone(KEY, now + 20) == {}


def test_from_the_third_time_in_a_minute_on_it_is_answered_after_growing_pauses() -> None:
    at, single, many = fight(15.0, 3600.0)
    assert (single, many) == ([D, D], [D]), "two events of healing and one of the contest, in an hour"
    pauses = [round(b - a, 3) for a, b in pairwise(at)]
    assert pauses[: MANY - 1] == [15.0, 15.0]
    assert pauses[MANY - 1 :] == sorted(pauses[MANY - 1 :])
    assert pauses[MANY - 1] >= FIRST_S
    assert MOST_S <= pauses[-1] <= MOST_S + 15.0
    assert len(at) < 20


@given(st.floats(min_value=0.1, max_value=25.0))
def test_an_hour_of_it_costs_few_writes_whatever_the_period(period_s: float) -> None:
    at, single, many = fight(period_s, 3600.0)
    assert len(at) <= 20
    assert (len(single), len(many)) == (MANY - 1, 1)


def test_others_are_not_left_alone_and_it_ends() -> None:
    contests = Contests()
    for now in (0.0, 1.0, 2.0):
        contests.put_right(KEY, [D], now)
    assert contests.left_alone(KEY, 3.0) == {D: 2.0 + FIRST_S}
    assert contests.left_alone(OTHER, 3.0) == {}
    assert contests.put_right(KEY, [S], 3.0) == ([S], [])
    assert contests.put_right(OTHER, [D], 3.0) == ([D], [])
    assert contests.left_alone(KEY, 2.0 + FIRST_S) == {}
    later = 2.0 + FIRST_S + WITHIN_S + 1.0
    assert contests.put_right(KEY, [D], later) == ([D], []), "a new one"
    contests.forget(KEY)
    assert contests._found.keys() == {OTHER}


def test_what_is_told() -> None:
    (once,), (often,) = healed([D]), contested([D])
    assert (once.reason, often.reason) == (Reason.CHILD_HEALED, Reason.CHILD_CONTESTED)
    assert often.warning and "Deployment svc-decode" in often.message and "pauses" in often.message
