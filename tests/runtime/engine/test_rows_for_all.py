"""Rows of a decode engine are for all who need one: those whose KV has arrived, and those that are computed there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from engine_world import World, request

from isthmus_runtime.engine.aging import EVERY
from isthmus_runtime.engine.sequence import Kind, OpenReceive
from isthmus_runtime.protocol.ticket import PrefillRecord


@dataclass
class Flood:
    """Clients whose prompts come from a peer, each with another one as soon as an answer has ended."""

    world: World
    clients: int
    prompt: int = 5
    priority: int = 0
    delay: int = 3
    """Turns until KV has arrived."""
    sent: int = 0
    ended: int = 0
    live: set[str] = field(default_factory=set)
    due: list[tuple[int, str]] = field(default_factory=list)

    def turn(self) -> None:
        world = self.world
        while len(self.live) < self.clients:
            self.sent += 1
            sid, prompt = f"r{self.sent}", [self.sent % 90, *range(1, self.prompt)]
            world.add(replace(request(sid, prompt, 12), priority=self.priority), kind=Kind.RECEIVE, attempt=sid)
            self.live.add(sid)
        world.turn()
        self.due += [(world.steps + self.delay, e.job.attempt) for e in world.effects if isinstance(e, OpenReceive)]
        world.effects.clear()
        while self.due and self.due[0][0] <= world.steps:
            _, sid = self.due.pop(0)
            record = PrefillRecord(attempt=sid, num_tokens=self.prompt, first_token=5, key_digest="", block_bytes=0)
            world.take(world.scheduler.received(sid, record))
            world.scheduler.released(sid, True)
        ended = {sid for sid in self.live if world.ends[sid]}
        self.live -= ended
        self.ended += len(ended)


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
