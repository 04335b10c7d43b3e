"""Room that all requests share."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import pytest

from isthmus_runtime.errors import Overloaded
from isthmus_runtime.sharing.budget import Budget


def test_one_client_leaves_room_for_the_largest_request_of_another() -> None:
    budget = Budget(40, 10, "things")
    with budget.holding(10, "a"), budget.holding(20, "a"):
        with pytest.raises(Overloaded, match="those of one client 30"), budget.holding(1, "a"):
            pass
        with budget.holding(10, "b"), pytest.raises(Overloaded, match="all together"), budget.holding(1, "b"):
            pass
    assert budget.held == 0 and not budget._of_client


def test_where_there_is_no_room_the_largest_of_the_client_that_has_most_ends() -> None:
    """Two clients had all vectors, and everybody else's request was refused as long as they went on."""
    budget, ended = Budget(40, 10, "things"), list[str]()

    def holding(name: str, count: int) -> AbstractContextManager[object]:
        return budget.holding(
            count, name[0], lambda error: ended.append(f"{name}: {error.message.partition(':')[0]} {error.status}")
        )

    def refused(name: str, count: int, text: str | None = None) -> None:
        with pytest.raises(Overloaded, match=text), holding(name, count):
            pass

    with ExitStack() as held:

        def take(name: str, count: int) -> list[str]:
            held.enter_context(holding(name, count))
            return ended[-1:]

        assert [take(*one) for one in (("a1", 10), ("a2", 12), ("b1", 9), ("b2", 8), ("c1", 1))] == [[]] * 5
        assert take("c2", 4) == ["a2: 12 things 429"] and budget.held == 32
        refused("b3", 9, "9 things")
        refused("c3", 13, "13 things")  # it would have most
        assert take("d1", 9) == ["b1: 9 things 429"] and budget.held == 32
        take("e1", 8)
        refused("f1", 10)  # a1 has as much
        assert take("f1", 9) == ["a1: 10 things 429"] and len(ended) == 3
    assert budget.held == 0 and not budget._of_client and not budget._running


def test_what_is_small_is_not_counted() -> None:
    budget = Budget(40, 10, "things", 3)
    with budget.holding(30, "a"), budget.holding(10, "b") as release:
        with budget.holding(3, "c"):
            assert budget.held == 40
        with pytest.raises(Overloaded, match="4 things"), budget.holding(4, "c"):
            pass
        release()
        with budget.holding(4, "c"):
            assert budget.held == 34
    assert budget.held == 0
