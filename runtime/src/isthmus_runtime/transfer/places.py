"""Which block goes where: prompt blocks by KV group and index, in one order on both sides. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from ..interfaces.handoff import BlockRef
from ..protocol.ticket import ReservedBlocks, Ticket

Place = tuple[int, int]
"""(KV group, prompt block index). Sorted, it is the order of a record's key digest and checksum."""


def place(block: BlockRef) -> Place:
    """Where the block belongs."""
    return block.group, block.index


def reserved(blocks: Sequence[BlockRef]) -> tuple[ReservedBlocks, ...]:
    """A receiver's blocks for its ticket; of each group they are a run of neighbours."""
    runs: list[ReservedBlocks] = []
    for group, refs in groupby(sorted(blocks, key=place), attrgetter("group")):
        run = list(refs)
        first = run[0].index
        assert [ref.index for ref in run] == list(range(first, first + len(run))), f"group {group} has gaps: {run}"
        runs.append(ReservedBlocks(group=group, first=first, block_ids=tuple(ref.block_id for ref in run)))
    return tuple(runs)


def block_at(ticket: Ticket) -> dict[Place, int]:
    """The receiver's block for each place; empty where the sender needs none of its addresses."""
    return {(run.group, run.first + i): block for run in ticket.blocks for i, block in enumerate(run.block_ids)}


def gaps(places: Iterable[Place]) -> list[Place]:
    """Places that are missing between the first and the last one of a group."""
    found: list[Place] = []
    for group, members in groupby(sorted(places), lambda p: p[0]):
        indices = [index for _, index in members]
        found += [(group, i) for i in sorted(set(range(indices[0], indices[-1])) - set(indices))]
    return found
