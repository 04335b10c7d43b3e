"""What of a prompt is read from the storage pool before it is computed, and when that is not tried. Pure.

A fetch takes blocks as an admitted request would, leases them to the pool's client, and makes what was read part of the
prefix cache; then the request waits as before, and hits it. A fetch that comes to nothing costs its time alone: it has
a deadline, requests that need no fetch go on meanwhile, and after a failure nobody fetches for a while (docs/adr/0062).
"""

from __future__ import annotations

from collections.abc import Callable

from .blocks import Hits, SequenceBlocks
from .handoffs import Handoffs
from .queues import Queues
from .sequence import Effect, Phase, Sequence

LEAST_BLOCKS = 4
"""For fewer the question takes about as long as computing them."""
AT_ONCE = 2
"""Fetches under way: the pool's client has four threads, and prompts that move need some."""
DEADLINE_S = 0.5
DEADLINE_TOKEN_S = 0.001
"""For each token more: small models compute one in about as long on a few cores, so no fetch takes much longer than
what it would save."""
PAUSE_S = 5.0
"""Without fetches after one that failed: a pool that does not answer costs one request in so long its fetch."""


class Fetches:
    """Requests in the phase FETCHING."""

    def __init__(
        self,
        queues: Queues,
        blocks: SequenceBlocks,
        handoffs: Handoffs,
        look_again: Callable[[float, str], None],
        *,
        enabled: bool,
    ) -> None:
        """`look_again(when, sid)`: a request has a further deadline. `enabled`: there is a pool, and one KV group of
        which every block counts, with a prefix cache."""
        self._queues = queues
        self._blocks = blocks
        self._handoffs = handoffs
        self._look_again = look_again
        self._enabled = enabled
        self._open: dict[str, tuple[Sequence, bytes]] = {}
        """By their names: for whom, and the hash of the first block that is read."""
        self._resume_at = 0.0
        self.queries = self.hits = self.failures = 0

    def first_missing(self, seq: Sequence, hits: Hits, most_tokens: int, now: float) -> bytes | None:
        """Hash of the first block that may be worth a fetch: `hits` lack it, and those behind it up to `most_tokens`.
        None: compute."""
        if not self._enabled or seq.fetched or seq.started or now < self._resume_at:
            return None
        first = hits.tokens // self._blocks.block_size
        if most_tokens // self._blocks.block_size - first < LEAST_BLOCKS or self._handoffs.known(seq.fetch):
            return None
        return seq.hashes[first]

    def under_way(self, first: bytes) -> bool:
        """Whether somebody's fetch begins with the same block, so that whoever waits for it will hit."""
        return any(hash_ == first for _, hash_ in self._open.values())

    @property
    def full(self) -> bool:
        """Whether no other may begin now."""
        return len(self._open) >= AT_ONCE

    def begin(self, seq: Sequence, hits: Hits, most_tokens: int, now: float) -> Effect:
        """Start one, for which there are blocks, for a request that waits."""
        size = self._blocks.block_size
        last = most_tokens // size
        tokens = last * size - hits.tokens
        seq.fetched = True
        self._queues.withdraw(seq)
        self._blocks.take_hits(seq, hits)
        self._open[seq.fetch] = (seq, seq.hashes[hits.tokens // size])
        self.queries += tokens
        deadline_s = min(seq.deadline_s, now + DEADLINE_S + DEADLINE_TOKEN_S * tokens)
        effect = self._handoffs.fetch(seq, last, deadline_s)
        self._queues.enter(seq, Phase.FETCHING)
        return effect

    def check(self) -> None:
        """Assert that nothing is under way. Raises AssertionError."""
        assert not self._open, f"idle, yet fetches are open: {list(self._open)}"

    def ended(self, name: str, count: int | None, now: float, *, fault: bool) -> bool:
        """The fetch `name` has come to its end, with `count` blocks that are whole. None: it failed, for a `fault` or
        because nobody wanted it any more, and bytes of it may still come. False: it is not under way."""
        found = self._open.pop(name, None)
        if found is None:
            return False
        if fault:
            self.failures += 1
            self._resume_at = now + PAUSE_S
        seq, _ = found
        if seq.phase is not Phase.FETCHING:
            return True  # it has ended; what was read goes with the hold
        if count is not None:  # else the blocks stay with the hold
            self._handoffs.fetched(seq, count)
            self.hits += count * self._blocks.block_size
        self._queues.leave(seq)
        self._queues.enter(seq, Phase.WAITING)
        self._look_again(seq.queue_deadline_s, seq.sid)
        return True
