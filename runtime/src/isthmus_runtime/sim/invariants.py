"""What must hold in every state of an engine, and at the end of a run. A `Violation` names the broken rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..engine.sequence import Kind, Phase
from ..executor.fake import entry_bytes
from ..interfaces.transport import Piece
from ..kv.keys import ExtraKeys, block_hashes
from ..kv.pool_records import BlockState
from ..kv.prefix import BlockStored
from ..transfer.leg import RELEASE_BOUND_S
from .clock import Violation
from .engine import VirtualEngine

RELEASE_WITHIN_S = RELEASE_BOUND_S + 0.3
"""From a request's end until its attempt's blocks are free or quarantined; the margin covers one engine step."""


class Oracle:
    """The right bytes of every block that may become visible under a hash."""

    def __init__(self, num_groups: int = 1) -> None:
        self._blocks: dict[tuple[bytes, int], bytes] = {}
        self._groups = range(num_groups)

    def learn(self, tokens: Sequence[int], block_size: int, salt: str) -> None:
        """Blocks of a sequence that clients may cause: a prompt and its right continuation."""
        for index, block_hash in enumerate(block_hashes(tokens, block_size, extra=ExtraKeys(cache_salt=salt))):
            start = index * block_size
            for group in self._groups:
                entries = (entry_bytes(group, tokens[p], p) for p in range(start, start + block_size))
                self._blocks[block_hash, group] = b"".join(entries)

    def check(self, block_hash: bytes, group: int, found: bytes | memoryview, where: str) -> None:
        """The bytes under this hash must be the right ones."""
        right = self._blocks.get((block_hash, group))
        if right is None:
            raise Violation(f"{where}: a hash is visible that no request can lead to")
        if right != bytes(found):
            raise Violation(f"{where}: visible before its bytes, or with wrong ones")

    def check_value(self, key: str, data: bytes) -> None:
        """Check a value in the store: full blocks by their hash."""
        if ":partial:" not in key and not key.startswith("record:"):
            _layout, block_hash, group, *_ = key.split(":")
            self.check(bytes.fromhex(block_hash), int(group.removeprefix("g")), data, f"store key {key}")


def check_engine(engine: VirtualEngine, oracle: Oracle, *, thorough: bool) -> None:
    """Everything that must hold after each step of one engine. `thorough`: also the pool's own check of each block."""
    try:
        if thorough:
            engine.scheduler.check()
        else:
            engine.pool.check(())
    except AssertionError as error:
        raise Violation(f"{engine.name}: {error}") from error
    _check_holds(engine)
    _check_orphans(engine)
    if unanswered := engine.unanswered():
        raise Violation(f"{engine.name}: callers wait for ended requests: {unanswered}")
    while engine.published:
        event = engine.published.popleft()
        block = engine.pool.cached_block(event.block_hash, event.group) if isinstance(event, BlockStored) else None
        if block is not None:
            found = engine.executor.fake.block_bytes(block)
            oracle.check(event.block_hash, event.group, found, f"{engine.name} block {block}")


def _check_holds(engine: VirtualEngine) -> None:
    """Count again, from the holders, what the pool says about each block."""
    scheduler, pool = engine.scheduler, engine.pool
    refs, readers, writers = ([0] * pool.num_blocks for _ in range(3))
    receiving: set[str] = set()
    for seq in scheduler.live():
        if seq.phase is Phase.RECEIVING:
            receiving.add(seq.sid)
        elif seq.phase is Phase.FETCHING:
            receiving.add(seq.fetch)
        for ids in seq.blocks:
            _count(refs, ids)
            if seq.phase is Phase.RUNNING and len(ids) * engine.block_size < seq.scheduled:
                raise Violation(f"{engine.name}: {seq.sid} is scheduled past its blocks")
    for _, ids in scheduler.steps.fenced:
        _count(refs, ids)
    quarantined: set[int] = set()
    for attempt, hold in scheduler.handoffs._holds.items():
        if not hold.receiving:
            _count(readers, hold.ids)
        elif hold.quarantined:
            quarantined.update(hold.ids)
        elif not hold.arrived:
            _count(writers, hold.ids)
            if attempt not in receiving:
                _count(refs, hold.ids)
    for block in quarantined:
        writers[block] = pool._writers[block]  # the pool keeps the lease until the drain
        if pool.state(block) is not BlockState.QUARANTINED:
            raise Violation(f"{engine.name}: block {block} left quarantine without a drain")
    if pool.counts().quarantined != len(quarantined):
        raise Violation(f"{engine.name}: {pool.counts().quarantined} blocks in quarantine, holders {len(quarantined)}")
    for what, found, right in (
        ("references", pool._refs, refs),
        ("readers", pool._readers, readers),
        ("writers", pool._writers, writers),
    ):
        if found.tolist() != right:
            block = next(b for b in range(pool.num_blocks) if found[b] != right[b])
            raise Violation(f"{engine.name}: block {block} has {found[block]} {what}, holders {right[block]}")


def _count(counts: list[int], ids: Iterable[int]) -> None:
    for block in ids:
        if block:
            counts[block] += 1


def _check_orphans(engine: VirtualEngine) -> None:
    """An attempt outlives its request only for as long as its transfer may take to stop."""
    live = {seq.attempt for seq in engine.scheduler.live() if seq.phase in (Phase.RECEIVING, Phase.RUNNING)}
    live |= {seq.attempt for seq in engine.scheduler.live() if seq.kind is Kind.SEND}
    live |= {seq.fetch for seq in engine.scheduler.live() if seq.phase is Phase.FETCHING}
    orphans: dict[str, float] = {}
    for attempt, hold in engine.scheduler.handoffs._holds.items():
        if attempt in live or hold.quarantined:
            continue
        orphans[attempt] = engine.orphans.get(attempt, engine.clock.now)
        held_s = engine.clock.now - orphans[attempt]
        if held_s > RELEASE_WITHIN_S:
            raise Violation(f"{engine.name}: attempt {attempt} holds blocks {held_s:.2f} s after its request ended")
    engine.orphans = orphans


def check_record_last(operations: Sequence[tuple[str, bool]]) -> None:
    """No record is on its way while blocks of its attempt are. Operations as (attempt, carries the record)."""
    writes = Counter(attempt for attempt, _ in operations)
    for attempt, record in operations:
        if record and writes[attempt] > 1:
            raise Violation(f"the record of attempt {attempt} is written while its blocks are still on their way")


def check_landing(engine: VirtualEngine, attempt: str, block: int) -> None:
    """A peer's bytes are about to land: only in blocks that are still held for this attempt."""
    hold = engine.scheduler.handoffs._holds.get(attempt)
    held = hold is not None and hold.receiving and not hold.arrived and block in hold.ids
    if not held or engine.pool.state(block) not in (BlockState.WRITING, BlockState.QUARANTINED):
        state = engine.pool.state(block).name
        raise Violation(f"{engine.name}: attempt {attempt} writes into block {block}, which is {state} and not its own")


def check_reading(engine: VirtualEngine, attempt: str, pieces: Iterable[Piece]) -> None:
    """A transfer under way reads these blocks: each must be under a reader lease."""
    for piece in pieces:
        if engine.pool._readers[piece.block_id] == 0:
            raise Violation(f"{engine.name}: attempt {attempt} reads block {piece.block_id} without a lease")


def check_visible(engine: VirtualEngine, oracle: Oracle) -> None:
    """Every visible block has the right bytes. Linear in the cache: done now and then, and at the end."""
    index = engine.pool._index
    for block in index:
        key = index.key_of(block)
        assert key is not None
        oracle.check(*key, engine.executor.fake.block_bytes(block), f"{engine.name} block {block}")


def check_clean(engine: VirtualEngine) -> None:
    """Nothing is left in an engine that has nothing to do."""
    left: list[str] = []
    if engine.scheduler.has_work:
        left.append(f"requests {[(s.sid, s.phase.value) for s in engine.scheduler.live()]}")
    if engine.scheduler.handoffs._holds:
        left.append(f"holds of {list(engine.scheduler.handoffs._holds)}")
    counts = engine.pool.counts()
    if counts.owned or counts.writing or counts.quarantined:
        left.append(f"blocks {counts}")
    if engine.agent.stats().live:
        left.append(f"legs {[(a, e.leg.state.value) for a, e in engine.agent._attempts.items()]}")
    if engine.busy:
        left.append("streams")
    if left:
        raise Violation(f"{engine.name} is not clean at the end: {'; '.join(left)}")
