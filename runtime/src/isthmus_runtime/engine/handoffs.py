"""The scheduler's side of KV transfers: which blocks an attempt holds, and under which keys. Pure.

A sending attempt holds reader leases, a receiving one holds writer leases and the request's references, from the
moment the transfer learns the block ids until it says `released`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from ..interfaces.handoff import BlockRef, FetchJob, PromptResult, ReceiveJob
from ..kv.keys import extra_keys, full_block_keys, root_hash, tail_key
from ..request import TokenLogprobs
from .blocks import SequenceBlocks
from .sequence import Effect, FinishSend, OpenFetch, OpenReceive, SendBlocks, Sequence


@dataclass(slots=True)
class _Hold:
    """What one attempt keeps out of circulation."""

    receiving: bool
    ids: list[int] = field(default_factory=list)
    arrived: bool = False
    kept: list[BlockRef] | None = None
    """What a sender has computed without a ticket; None: it has one."""
    result: PromptResult | None = None
    """Of a prompt that was computed before its ticket came."""
    quarantined: bool = False
    """Released, but bytes may still move: a receiver's blocks are quarantined, a sender's reader leases stay."""


class Handoffs:
    """Holds per attempt. The scheduler asks it to reserve, hand out and take back; the pool does the counting."""

    def __init__(self, blocks: SequenceBlocks, layout_digest: str, kv_heads: int) -> None:
        self._blocks = blocks
        self._pool = blocks.pool
        self._layout = layout_digest
        self._heads = (0, kv_heads)
        self._holds: dict[str, _Hold] = {}

    @property
    def empty(self) -> bool:
        """Whether no attempt holds anything, be it in quarantine."""
        return not self._holds

    def idle(self) -> bool:
        """Whether no attempt holds anything, except blocks in quarantine."""
        return all(hold.quarantined and hold.receiving for hold in self._holds.values())

    def receiving_blocks(self) -> int:
        """Blocks that peers are writing or about to write."""
        return sum(len(hold.ids) for hold in self._holds.values() if hold.receiving and not hold.quarantined)

    def open(self, attempt: str) -> bool:
        """Whether the transfer of this attempt still has something to end."""
        hold = self._holds.get(attempt)
        return hold is not None and not hold.arrived and not hold.quarantined

    def known(self, attempt: str) -> bool:
        """Whether the attempt holds anything, be it in quarantine."""
        return attempt in self._holds

    def open_send(self, attempt: str, *, ticket: bool = True) -> None:
        """A sending leg exists from now on, before it holds any block. Without a ticket: `give_ticket` will bring it,
        and until then there is no transfer that could be told anything."""
        assert attempt not in self._holds, f"attempt {attempt} opened twice"
        self._holds[attempt] = _Hold(receiving=False, kept=None if ticket else [])

    def awaits_ticket(self, attempt: str) -> bool:
        """Whether a sending leg has none yet."""
        hold = self._holds.get(attempt)
        return hold is not None and hold.kept is not None

    def give_ticket(self, attempt: str, skip_blocks: int) -> list[Effect]:
        """What was computed meanwhile may go, from block `skip_blocks` on."""
        hold = self._holds[attempt]
        assert hold.kept is not None, f"attempt {attempt} has its ticket"
        refs, hold.kept = tuple(ref for ref in hold.kept if ref.index >= skip_blocks), None
        effects: list[Effect] = [SendBlocks(attempt, refs)] if refs else []
        if hold.result is not None:
            effects.append(FinishSend(attempt, hold.result))
        return effects

    # ----------------------------------------------------------------------------------------------------- receive

    def reserve(self, seq: Sequence) -> Effect:
        """Take blocks for the prompt beyond the local hits, lease them to the peer, and describe the job.

        Of a sliding group only what the next token looks back at moves.
        """
        skip = len(seq.blocks[0])
        places = self._blocks.grow_to_receive(seq)
        ids = [block for _, _, block in places]
        self._pool.lease_write(ids)
        self._holds[seq.attempt] = _Hold(receiving=True, ids=ids)
        return OpenReceive(
            ReceiveJob(
                request_id=seq.request.request_id,
                attempt=seq.attempt,
                skip_blocks=skip,
                blocks=tuple(
                    ref
                    for group, run in groupby(places, itemgetter(0))
                    for ref in self._refs(seq, group, [index for _, index, _ in run])
                ),
                num_tokens=seq.prompt_len,
                peer_url=seq.peer_url,
                peer_epoch=seq.peer_epoch,
                deadline_s=seq.deadline_s,
            )
        )

    def received(self, attempt: str) -> bool:
        """The writers are done, the bytes verified: the blocks become ordinary owned ones. False: not expected."""
        hold = self._holds.get(attempt)
        if hold is None or not hold.receiving or hold.arrived:
            return False
        self._pool.end_write(hold.ids, ok=True)
        hold.arrived = True
        hold.ids = []
        return True

    def detach(self, seq: Sequence, attempt: str) -> list[int]:
        """The request leaves while it is written for `attempt`: its local hits come back to the caller, the rest stays
        held."""
        hold = self._holds[attempt]
        kept = set(hold.ids)
        ids = [b for b in self._blocks.take_all(seq) if b not in kept]
        return ids

    # ------------------------------------------------------------------------------------------------------- fetch

    def fetch(self, seq: Sequence, last: int, deadline_s: float) -> Effect:
        """Take blocks for prompt blocks beyond the local hits and before `last`, lease them to the storage pool's
        client, and describe the job. Where there is one KV group."""
        own = seq.blocks[0]
        first = len(own)
        ids = self._pool.allocate(last - first).blocks
        own.extend(ids)
        self._pool.lease_write(ids)
        self._holds[seq.fetch] = _Hold(receiving=True, ids=list(ids))
        blocks = tuple(self._refs(seq, 0, range(first, last)))
        return OpenFetch(FetchJob(attempt=seq.fetch, blocks=blocks, deadline_s=deadline_s))

    def fetched(self, seq: Sequence, count: int) -> None:
        """The first `count` blocks of the job are whole, and visible from now on. All are the request's own again."""
        hold = self._holds[seq.fetch]
        assert hold.receiving and not hold.arrived and not hold.quarantined, f"{seq.fetch} came to its end twice"
        self._pool.end_write(hold.ids[:count], ok=True)
        self._pool.end_write(hold.ids[count:], ok=False)
        self._blocks.show(seq, len(seq.blocks[0]) - len(hold.ids), count)
        hold.arrived = True
        hold.ids = []

    # -------------------------------------------------------------------------------------------------------- send

    def blocks_written(self, seq: Sequence) -> list[Effect]:
        """Hand over prompt blocks that became final with the last step."""
        full = min(seq.written, seq.prompt_len) // self._blocks.block_size
        return self._hand_over(seq, full)

    def prompt_done(self, seq: Sequence, token: int, logprob: TokenLogprobs | None) -> list[Effect]:
        """Hand over the rest, the incomplete last block too, and what the record is made of."""
        total = -(-seq.prompt_len // self._blocks.block_size)
        effects = self._hand_over(seq, total)
        result = PromptResult(num_tokens=seq.prompt_len, first_token=token, first_logprobs=logprob)
        hold = self._holds.get(seq.attempt)
        if hold is not None and hold.kept is not None:
            hold.result = result
        else:
            effects.append(FinishSend(seq.attempt, result))
        return effects

    def _hand_over(self, seq: Sequence, last: int) -> list[Effect]:
        """Give the transfer what decode will take of the prompt blocks before `last`, and has not been given."""
        hold = self._holds.get(seq.attempt)
        if hold is None:
            return []
        refs: list[BlockRef] = []
        for g, group in enumerate(self._blocks.groups):
            first = max(seq.sent_blocks, seq.skip_blocks, group.passed(seq.prompt_len))
            refs += self._refs(seq, g, range(first, last))
        seq.sent_blocks = max(seq.sent_blocks, last)
        if not refs:
            return []
        ids = [ref.block_id for ref in refs]
        self._pool.lease_read(ids)
        hold.ids += ids
        if hold.kept is not None:
            hold.kept += refs
            return []
        return [SendBlocks(seq.attempt, tuple(refs))]

    # -------------------------------------------------------------------------------------------------- both sides

    def released(self, attempt: str, drained: bool) -> bool:
        """End the holds, or keep what bytes may still be read from or written to. False when unknown or repeated."""
        hold = self._holds.get(attempt)
        if hold is None or hold.quarantined:
            return False
        if not drained:
            assert not hold.arrived, f"attempt {attempt} arrived whole and is still being written"
            hold.quarantined = True
            if hold.receiving:
                self._pool.quarantine(hold.ids)
            return True
        if not hold.receiving:
            self._pool.end_read(hold.ids)
        elif not hold.arrived:
            self._pool.end_write(hold.ids, ok=False)
            self._pool.release(hold.ids)
        del self._holds[attempt]
        return True

    def drained(self, attempt: str) -> bool:
        """The quarantine of this attempt is over."""
        hold = self._holds.get(attempt)
        if hold is None or not hold.quarantined:
            return False
        if hold.receiving:
            self._pool.unquarantine(hold.ids)
        else:
            self._pool.end_read(hold.ids)
        del self._holds[attempt]
        return True

    # -------------------------------------------------------------------------------------------------------- keys

    def _refs(self, seq: Sequence, group: int, indices: Collection[int]) -> list[BlockRef]:
        """Prompt blocks of a group under their content keys. They ascend: only the last may be incomplete, and its key
        is the attempt's own."""
        full, own, hashes = seq.prompt_len // self._blocks.block_size, seq.blocks[group], seq.hashes
        whole = [index for index in indices if index < full]
        keys = full_block_keys(self._layout, [hashes[index] for index in whole], self._heads, group=group)
        keys += [self._tail_key(seq, group, index) for index in indices if index >= full]
        refs = [BlockRef(index, own[index], key, group) for index, key in zip(indices, keys, strict=True)]
        assert all(ref.block_id for ref in refs), f"{seq.sid} gave blocks of group {group} back before they were sent"
        return refs

    def _tail_key(self, seq: Sequence, group: int, index: int) -> str:
        start = index * self._blocks.block_size
        tail = seq.request.prompt_token_ids[start:]
        extra = extra_keys(seq.request)
        parent = seq.hashes[index - 1] if index else root_hash(extra)
        return tail_key(
            self._layout,
            parent,
            len(tail),
            tail,
            seq.request.request_id,
            seq.attempt,
            self._heads,
            group=group,
            extra=extra,
            start=start,
        )
