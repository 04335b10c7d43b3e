"""An executor without a model: each next token is a function of the KV bytes it finds through the block table.

A wrong, stale, missing or garbled block therefore changes the tokens, as it would with a real model, and
`expected_tokens` says what they must be. Used by protocol, load and fault tests and by the simulator. Torch-free.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from zlib import crc32

from ..errors import ConfigError
from ..interfaces.steps import NOTHING_DRAWN, RowBlocks, RowMask, RowOutput, RowStart, StepOutput, StepPlan
from ..interfaces.transport import KvRegion
from ..request import SamplingParams, TokenLogprobs

ENTRY_BYTES = 8
"""KV bytes per position: token id and position, 4 bytes each."""
_ENTRY = struct.Struct("<iI")
VOCAB_SIZE = 997
"""Ids it generates."""
MAX_TOKEN_IDS = 1 << 31
"""Ids it takes: prompts come from any tokenizer."""


def _next(state: int, sampling: SamplingParams, position: int) -> int:
    seed = sampling.seed if sampling.temperature > 0 else 0
    return crc32(struct.pack("<qI", seed, position), state) % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], sampling: SamplingParams, count: int) -> list[int]:
    """The tokens that follow `prompt` when every KV byte is right."""
    state = 0
    for position, token in enumerate(prompt):
        state = crc32(_ENTRY.pack(token, position), state)
    out: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        token = _next(state, sampling, position)
        out.append(token)
        state = crc32(_ENTRY.pack(token, position), state)
    return out


def _first_allowed(token: int, mask: RowMask) -> int:
    """The token, or the next higher id that the mask allows, from 0 on again after the last."""
    bits = mask.allowed[0]
    ids = [i for i in range(8 * len(bits)) if bits[i // 8] >> i % 8 & 1]
    assert ids, f"row {mask.row}: its mask allows no token"
    return next((i for i in ids if i >= token), ids[0])


class _Row:
    """One row of the persistent batch."""

    __slots__ = ("blocks", "sampling", "tokens")

    def __init__(self, start: RowStart) -> None:
        self.tokens = list(start.token_ids)
        self.blocks = [list(ids) for ids in start.block_ids]
        self.sampling = start.sampling


class FakeExecutor:
    """Implements `interfaces.Executor`. `run` is synchronous and deterministic; `submit` runs it in a thread."""

    def __init__(self, num_blocks: int, block_size: int, *, layout_digest: str = "fake") -> None:
        self._block_size = block_size
        self._block_bytes = block_size * ENTRY_BYTES
        try:
            self._buffer = ctypes.create_string_buffer(num_blocks * self._block_bytes)
        except (MemoryError, OverflowError) as e:
            raise ConfigError(
                f"the KV pool of {num_blocks * self._block_bytes} bytes cannot be allocated; lower --kv-memory"
            ) from e
        self._view = memoryview(self._buffer).cast("B")
        self._memory = KvRegion(
            base=ctypes.addressof(self._buffer),
            num_blocks=num_blocks,
            block_bytes=self._block_bytes,
            block_stride=self._block_bytes,
            layout_digest=layout_digest,
        )
        self._rows: dict[int, _Row] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="fake-executor")

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step."""
        return self._worker.submit(self.run, plan)

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute one step now."""
        assert not plan.adapters and not any(chunk.drafts for chunk in plan.chunks), "not in this executor"
        for copy in plan.copies:
            self.block_bytes(copy.target)[:] = self.block_bytes(copy.source)
        for start in plan.starts:
            self._rows[start.row] = _Row(start)
        for grown in plan.grown:
            self._grow(grown)
        masks = {mask.row: mask for mask in plan.masks}
        drawn: list[RowOutput] = []
        for chunk in plan.chunks:
            row = self._rows[chunk.row]
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                at = self._at(row, position)
                _ENTRY.pack_into(self._view, at, row.tokens[position], position)
            if not chunk.draws:
                drawn.append(NOTHING_DRAWN)
                continue
            length = chunk.start + chunk.num_tokens
            token = _next(self._state(row, length), row.sampling, length)
            if chunk.row in masks:
                token = _first_allowed(token, masks[chunk.row])
            del row.tokens[length:]
            row.tokens.append(token)
            # The next token is certain, so it is its own only alternative.
            logprobs = (TokenLogprobs(token, 0.0, ((token, 0.0),)),) if row.sampling.logprobs >= 0 else ()
            drawn.append(RowOutput((token,), logprobs))
        return StepOutput(plan.step, tuple(drawn))

    def _grow(self, grown: RowBlocks) -> None:
        table = self._rows[grown.row].blocks[grown.group]
        table[grown.index : grown.index + len(grown.block_ids)] = grown.block_ids

    def _at(self, row: _Row, position: int) -> int:
        block = row.blocks[0][position // self._block_size]
        assert block != 0, f"position {position} would be written into the null block"
        return block * self._block_bytes + position % self._block_size * ENTRY_BYTES

    def _state(self, row: _Row, length: int) -> int:
        """Digest of positions [0, length), read through the block table."""
        state, left = 0, length * ENTRY_BYTES
        for block in row.blocks[0]:
            if left <= 0:
                break
            base = block * self._block_bytes
            state = crc32(self._view[base : base + min(left, self._block_bytes)], state)
            left -= self._block_bytes
        return state

    def block_bytes(self, block_id: int) -> memoryview:
        """The block's bytes, writable: for tests that poison or inspect them."""
        return self._view[block_id * self._block_bytes : (block_id + 1) * self._block_bytes]

    def kv_region(self) -> KvRegion:
        """The pool as plain memory."""
        return self._memory

    def close(self) -> None:
        """Stop the worker thread."""
        self._worker.shutdown(wait=True, cancel_futures=True)
