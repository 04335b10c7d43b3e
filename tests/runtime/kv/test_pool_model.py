"""Random operations on the pool against a naive model that predicts every answer, refusal and eviction."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.kv.pool_records import BlockState, OutOfBlocks, PoolError

NUM_BLOCKS = 7
NUM_GROUPS = 2
# The null block and two ids outside the pool are drawn as well.
ids = st.lists(st.integers(-1, NUM_BLOCKS), max_size=4)
hashes = st.integers(0, 3).map(lambda number: bytes([number]) * 32)
groups = st.integers(0, NUM_GROUPS - 1)


@dataclass
class Block:
    refs: int = 0
    readers: int = 0
    writers: int = 0
    quarantined: bool = False
    failed: bool = False
    key: tuple[int, bytes] | None = None

    @property
    def held(self) -> bool:
        return self.quarantined or self.refs + self.readers + self.writers > 0


@dataclass
class Model:
    """Free blocks as one plain list, front first."""

    blocks: dict[int, Block] = field(default_factory=lambda: {i: Block() for i in range(1, NUM_BLOCKS)})
    free: list[int] = field(default_factory=lambda: list(range(1, NUM_BLOCKS)))

    def state(self, number: int) -> BlockState:
        if number == 0:
            return BlockState.NULL
        block = self.blocks[number]
        if block.quarantined:
            return BlockState.QUARANTINED
        if block.writers:
            return BlockState.WRITING
        if block.refs or block.readers:
            return BlockState.OWNED
        return BlockState.CACHED if block.key else BlockState.FREE

    def settle(self, number: int) -> None:
        block = self.blocks[number]
        if block.held and number in self.free:
            self.free.remove(number)
        elif not block.held and number not in self.free:
            block.failed = False
            if block.key:
                self.free.append(number)
            else:
                self.free.insert(0, number)

    def visible(self, key: tuple[int, bytes]) -> int | None:
        return next((number for number, block in self.blocks.items() if block.key == key), None)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, num_groups=NUM_GROUPS)
        self.model = Model()

    def known(self, numbers: list[int], *, null: bool = False) -> bool:
        return all(number in self.model.blocks or (null and number == 0) for number in numbers)

    def enough(self, numbers: list[int], hold: str, *, null: bool = False) -> bool:
        return self.known(numbers, null=null) and all(
            number == 0 or numbers.count(number) <= getattr(self.model.blocks[number], hold) for number in numbers
        )

    @rule(n=st.integers(-1, NUM_BLOCKS))
    def allocate(self, n: int) -> None:
        if n < 0 or n > len(self.model.free):
            with pytest.raises(PoolError if n < 0 else OutOfBlocks):
                self.pool.allocate(n)
            return
        was = {number: block.key for number, block in self.model.blocks.items() if block.key}
        blocks, evicted = self.pool.allocate(n)
        assert [(e.block_id, (e.group, e.block_hash)) for e in evicted] == [(b, was[b]) for b in blocks if b in was]
        self.take(blocks, n)

    def take(self, got: list[int], n: int) -> None:
        assert got == self.model.free[:n]
        for number in got:
            self.model.free.remove(number)
            self.model.blocks[number] = Block(refs=1)

    @rule(numbers=ids)
    def touch(self, numbers: list[int]) -> None:
        legal = self.known(numbers, null=True) and not any(
            self.model.state(number) in (BlockState.FREE, BlockState.QUARANTINED) for number in numbers
        )
        if not legal:
            with pytest.raises(PoolError):
                self.pool.touch(numbers)
            return
        self.pool.touch(numbers)
        for number in numbers:
            if number:
                self.model.blocks[number].refs += 1
                self.model.settle(number)

    @rule(numbers=ids)
    def release(self, numbers: list[int]) -> None:
        if not self.enough(numbers, "refs", null=True):
            with pytest.raises(PoolError):
                self.pool.release(numbers)
            return
        self.pool.release(numbers)
        for number in reversed(numbers):
            if number:
                self.model.blocks[number].refs -= 1
                self.model.settle(number)

    @precondition(lambda self: any(block.refs for block in self.model.blocks.values()))
    @rule(data=st.data())
    def release_a_held_one(self, data: st.DataObject) -> None:
        held = [number for number, block in self.model.blocks.items() if block.refs]
        self.release(data.draw(st.lists(st.sampled_from(held), unique=True, min_size=1)))

    @rule(number=st.integers(-1, NUM_BLOCKS), block_hash=hashes, group=groups)
    def publish(self, number: int, block_hash: bytes, group: int) -> None:
        block = self.model.blocks.get(number)
        key = (group, block_hash)
        if (
            block is None
            or not block.refs
            or block.writers
            or block.quarantined
            or block.failed
            or (block.key is not None and block.key != key)
        ):
            with pytest.raises(PoolError):
                self.pool.publish(number, block_hash, group, token_ids=[1])
            return
        first = self.model.visible(key) in (None, number)
        assert self.pool.publish(number, block_hash, group, token_ids=[1]) is first
        if first:
            block.key = key

    @rule(block_hash=hashes, group=groups)
    def find(self, block_hash: bytes, group: int) -> None:
        assert self.pool.cached_block(block_hash, group) == self.model.visible((group, block_hash))

    @rule(numbers=ids)
    def lease_write(self, numbers: list[int]) -> None:
        blocks = [self.model.blocks[number] for number in numbers] if self.known(numbers) else []
        if len(blocks) < len(numbers) or any(
            not block.refs or block.quarantined or block.key or block.readers for block in blocks
        ):
            with pytest.raises(PoolError):
                self.pool.lease_write(numbers)
            return
        self.pool.lease_write(numbers)
        for block in blocks:
            if not block.writers:
                block.failed = False
            block.writers += 1

    @rule(numbers=ids, ok=st.booleans())
    def end_write(self, numbers: list[int], ok: bool) -> None:
        if not self.enough([n if n else -1 for n in numbers], "writers"):
            with pytest.raises(PoolError):
                self.pool.end_write(numbers, ok)
            return
        self.pool.end_write(numbers, ok)
        for number in numbers:
            block = self.model.blocks[number]
            block.writers -= 1
            block.failed = block.failed or not ok
            self.model.settle(number)

    @rule(numbers=ids)
    def lease_read(self, numbers: list[int]) -> None:
        if not self.known(numbers) or any(
            self.model.state(number) not in (BlockState.OWNED, BlockState.CACHED) for number in numbers
        ):
            with pytest.raises(PoolError):
                self.pool.lease_read(numbers)
            return
        self.pool.lease_read(numbers)
        for number in numbers:
            self.model.blocks[number].readers += 1
            self.model.settle(number)

    @rule(numbers=ids)
    def end_read(self, numbers: list[int]) -> None:
        if not self.enough([n if n else -1 for n in numbers], "readers"):
            with pytest.raises(PoolError):
                self.pool.end_read(numbers)
            return
        self.pool.end_read(numbers)
        for number in reversed(numbers):
            self.model.blocks[number].readers -= 1
            self.model.settle(number)

    @rule(numbers=ids)
    def quarantine(self, numbers: list[int]) -> None:
        legal = self.known(numbers) and len(set(numbers)) == len(numbers)
        if not legal or any(
            self.model.blocks[number].quarantined or not self.model.blocks[number].writers for number in numbers
        ):
            with pytest.raises(PoolError):
                self.pool.quarantine(numbers)
            return
        self.pool.quarantine(numbers)
        for number in numbers:
            block = self.model.blocks[number]
            block.quarantined = True
            block.refs = max(0, block.refs - 1)

    @rule(numbers=ids)
    def unquarantine(self, numbers: list[int]) -> None:
        legal = self.known(numbers) and len(set(numbers)) == len(numbers)
        if not legal or not all(self.model.blocks[number].quarantined for number in numbers):
            with pytest.raises(PoolError):
                self.pool.unquarantine(numbers)
            return
        self.pool.unquarantine(numbers)
        for number in numbers:
            block = self.model.blocks[number]
            block.quarantined, block.writers, block.failed = False, 0, True
            self.model.settle(number)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts.total == NUM_BLOCKS
        states = [self.model.state(number) for number in range(NUM_BLOCKS)]
        assert [self.pool.state(number) for number in range(NUM_BLOCKS)] == states
        assert counts.quarantined == states.count(BlockState.QUARANTINED)
        assert counts.writing == states.count(BlockState.WRITING)
        assert self.pool.num_free == len(self.model.free)
        for number, block in self.model.blocks.items():
            assert self.pool.refs(number) == block.refs


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolAgainstModel = PoolMachine.TestCase
