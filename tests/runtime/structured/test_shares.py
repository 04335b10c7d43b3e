"""Who gives way where grammars take too much: the largest of the client that has most, and what is shared last."""

from __future__ import annotations

import random

import pytest

from isthmus_runtime.structured.shares import Held, giving_way

MANY = {("many", 1): 0, ("many", 2): 0, ("few", 3): 0}


@pytest.mark.parametrize(
    ("grammars", "walks", "need", "new", "gone"),
    [
        ({1: 10, 2: 20, 3: 25}, MANY, 5, 8, [("many", 2)]),
        ({1: 10, 2: 20, 3: 25}, MANY, 21, 8, [("many", 2), ("few", 3)]),
        # A walk counts with its grammar.
        ({1: 10, 2: 20, 3: 25}, {**MANY, ("many", 1): 30}, 5, 8, [("many", 1)]),
        # Whoever asks has most, or would: what is no larger than the new one stays.
        ({1: 10, 2: 20, 3: 25}, MANY, 5, 31, None),
        # Parts of what is shared: 1 is the largest, and a third of it is the smallest part.
        ({1: 24, 2: 20, 3: 10}, {**MANY, ("few", 1): 0, ("fewer", 1): 0}, 5, 3, [("many", 2)]),
        # It is free when the last of those that share it has gone.
        ({1: 30}, {("a", 1): 0, ("b", 1): 0}, 5, 3, [("a", 1), ("b", 1)]),
        ({}, {}, 5, 3, None),
    ],
)
def test_the_largest_of_who_has_most(
    grammars: dict[int, int], walks: dict[Held, int], need: int, new: int, gone: list[Held] | None
) -> None:
    assert giving_way(grammars, walks, need, "new", new) == gone


@pytest.mark.parametrize("seed", range(20))
def test_what_gives_way_is_enough_and_is_nobody_s_who_has_less(seed: int) -> None:
    rng = random.Random(seed)
    grammars = {key: rng.randint(1, 50) for key in range(12)}
    walks = {(rng.choice("abcd"), rng.randrange(12)): rng.randint(0, 9) for _ in range(20)}
    grammars = {key: grammars[key] for key in {key for _, key in walks}}
    need = rng.randint(1, sum(grammars.values()))
    gone = giving_way(grammars, walks, need, "e", 1)
    assert gone is not None, f"seed {seed}"
    left = {held: walk for held, walk in walks.items() if held not in gone}
    unused = grammars.keys() - {key for _, key in left}
    assert sum(walks[held] for held in gone) + sum(grammars[key] for key in unused) >= need, f"seed {seed}"
    assert len(gone) == len(set(gone)) and giving_way(grammars, walks, need, "e", 1) == gone
