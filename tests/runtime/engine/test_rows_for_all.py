"""Rows of a decode engine are for all who need one: those whose KV has arrived, and those that are computed there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_world import Flood, World, request

from isthmus_runtime.engine.aging import EVERY


def flooded(clients: int, *, blocks: int = 4000, rows: int = 4, prompt: int = 5, priority: int = 0) -> Flood:
    world = World(num_blocks=blocks, max_num_seqs=rows, poison=False, max_batched_tokens=64)
    flood = Flood(world, clients, prompt, priority)
    for _ in range(100):
        flood.turn()
    return flood


@pytest.mark.parametrize("clients", [6, 16])
@pytest.mark.parametrize(
    ("priority", "theirs", "most"),
    [
        (0, 0, 16 + 4),  # those that came before, and those that run
        (-100, 0, 2 * 4),
        (0, -100, EVERY * 16 + 4),
    ],
)
def test_what_is_computed_here_starts_beside_what_keeps_arriving(
    clients: int, priority: int, theirs: int, most: int
) -> None:
    """Arrived ones had every free row, and more were sent for while it waited: it started after none of 2,000."""
    flood = flooded(clients, priority=theirs)
    world, before = flood.world, flood.ended
    world.add(replace(request("here", [9, 8, 7, 6, 5], 4), priority=priority))
    while not world.tokens["here"]:
        assert flood.ended - before <= most, f"{flood.ended - before} others have ended"
        flood.turn()


def test_a_long_prompt_starts_where_what_arrives_fills_the_pool() -> None:
    flood = flooded(12, blocks=41, rows=3, prompt=17)
    world, before = flood.world, flood.ended
    world.add(request("here", [i % 50 + 1 for i in range(57)], 4))
    while not world.tokens["here"]:
        assert flood.ended - before <= 3 * 12, f"{flood.ended - before} others have ended"
        flood.turn()


def test_what_waits_for_a_row_finds_its_blocks_when_it_comes() -> None:
    """What comes later was promised all of them meanwhile, each time anew. What has arrived goes on until then: it
    holds blocks that the other one needs."""
    world = World(num_blocks=13, max_num_seqs=1, poison=False)
    flood = Flood(world, 2, prompt=9)
    flood.turn()
    world.add(replace(request("large", list(range(1, 40)), 4), priority=-1))
    for _ in range(200):
        flood.turn()
    assert world.ends["large"] and flood.ended > 2
