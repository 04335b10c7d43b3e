"""An executor without a model: each next token is a function of the KV bytes it finds through the block table.

A wrong, stale, missing or garbled block therefore changes the tokens, as it would with a real model, and
`expected_tokens` says what they must be. Used by protocol, load and fault tests and by the simulator. Torch-free.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from zlib import crc32

from ..errors import ConfigError, WeightsError
from ..interfaces.steps import (
    NOTHING_DRAWN,
    Adapter,
    Chunk,
    Pooled,
    PromptScores,
    RowBlocks,
    RowOutput,
    RowStart,
    StepOutput,
    StepPlan,
)
from ..interfaces.transport import KvRegion
from ..request import PoolingParams, SamplingParams, TokenLogprobs
from ..threads import running_pool
from . import late_masks

ENTRY_BYTES = 8
"""KV bytes per position: token id and position, 4 bytes each."""
_ENTRY = struct.Struct("<iI")
DIMENSIONS = 8
"""Of its embeddings."""
VOCAB_SIZE = 997
"""Ids it generates."""
_GROUP_SHIFT = 28
"""Where an entry says its KV group: one group's block in another's place shows."""
Windows = tuple[int | None, ...]
MAX_TOKEN_IDS = 1 << 31
"""Ids it takes: prompts come from any tokenizer."""


def _next(state: int, sampling: SamplingParams, position: int) -> int:
    seed = sampling.seed if sampling.temperature > 0 else 0
    return crc32(struct.pack("<qI", seed, position), state) % VOCAB_SIZE


def adapter_salt(digest: str) -> int:
    """What an adapter changes in every token's KV; 0 without one."""
    return crc32(digest.encode()) >> 1


def entry_bytes(group: int, token: int, position: int, salt: int = 0) -> bytes:
    """The KV of one position in one KV group. `salt`: of the adapter that it is computed with."""
    return _ENTRY.pack(token ^ salt, position | group << _GROUP_SHIFT)


def first_visible(window: int | None, length: int) -> int:
    """The first position that the last of `length` positions sees: itself and window - 1 before it."""
    return 0 if window is None else max(0, length - window)


def _state_of(states: Sequence[int]) -> int:
    """One digest of the digests of all groups."""
    state = states[0]
    for other in states[1:]:
        state = crc32(struct.pack("<I", other), state)
    return state


def expected_tokens(
    prompt: Sequence[int], sampling: SamplingParams, count: int, windows: Windows = (None,), adapter: str = ""
) -> list[int]:
    """The tokens that follow `prompt` when every KV byte is right. `windows`: of each KV group, None for all;
    `adapter`: the digest of the request's."""
    salt = adapter_salt(adapter)
    tokens = list(prompt)
    whole = [0] * len(windows)
    for length in range(1, len(prompt) + count):
        states: list[int] = []
        for group, window in enumerate(windows):
            if window is None:
                whole[group] = crc32(entry_bytes(group, tokens[length - 1], length - 1, salt), whole[group])
                states.append(whole[group])
            elif length >= len(prompt):
                seen = range(first_visible(window, length), length)
                states.append(crc32(b"".join(entry_bytes(group, tokens[p], p, salt) for p in seen)))
        if length >= len(prompt):
            tokens.append(_next(_state_of(states), sampling, length))
    return tokens[len(prompt) :]


def expected_scores(prompt: Sequence[int], alternatives: int) -> list[TokenLogprobs]:
    """What is told of `prompt`, from its second token on, when every KV byte is right (one group, no window)."""
    found, state = [], 0
    for position, token in enumerate(prompt[:-1]):
        state = crc32(entry_bytes(0, token, position), state)
        found.append(_score(state, prompt[position + 1], alternatives))
    return found


def expected_vector(prompt: Sequence[int], pooling: PoolingParams) -> bytes:
    """The embedding of `prompt` when every KV byte is right (one group, no window)."""
    state = crc32(b"".join(entry_bytes(0, token, position) for position, token in enumerate(prompt)))
    return _vector(state, pooling)


def _vector(state: int, pooling: PoolingParams) -> bytes:
    count = pooling.dimensions or DIMENSIONS
    return struct.pack(f"<{count}f", *((state >> 4 * i & 15) / 16 for i in range(count)))


def _score(state: int, token: int, alternatives: int) -> TokenLogprobs:
    """Values that depend on all KV that the token's predecessor sees, and on the token."""
    seen = crc32(struct.pack("<q", token), state)
    top = tuple(((seen + i) % VOCAB_SIZE, -0.25 * i) for i in range(alternatives))
    return TokenLogprobs(token, -(seen % 4096) / 256, top, seen % 64 + 1)


def _first_allowed(token: int, bits: bytes) -> int:
    """The token, or the next higher id that the mask allows, from 0 on again after the last."""
    ids = [i for i in range(8 * len(bits)) if bits[i // 8] >> i % 8 & 1]
    assert ids, "a mask allows no token"
    return next((i for i in ids if i >= token), ids[0])


class _Row:
    """One row of the persistent batch."""

    __slots__ = ("blocks", "pooling", "prompt_len", "salt", "sampling", "slot", "tokens", "wanted")

    def __init__(self, start: RowStart) -> None:
        self.slot = start.adapter
        self.salt = 0
        self.tokens = list(start.token_ids)
        self.blocks = [list(ids) for ids in start.block_ids]
        self.sampling = start.sampling
        self.prompt_len = start.prompt_len
        self.wanted = start.prompt_logprobs
        self.pooling = start.pooling


@dataclass(frozen=True, slots=True)
class FakeAdapter:
    """`interfaces.steps.Adapter`: nothing but its name and size."""

    digest: str
    nbytes: int


class FakeExecutor:
    """Implements `interfaces.steps.Executor` and `AdapterHolder`. `run` is synchronous and deterministic; `submit` runs
    it in a thread."""

    def __init__(
        self, num_blocks: int, block_size: int, *, layout_digest: str = "fake", windows: Windows = (None,)
    ) -> None:
        """`windows`: the sliding window of each KV group in tokens, None where a group keeps the whole prefix."""
        self._block_size = block_size
        self._windows = windows
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
        self._known: dict[str, int] = {}
        self._slots: dict[int, str] = {0: ""}
        """Digest of the adapter in each."""
        self._thread = running_pool(1, "fake-executor")

    def read(self, folder: str) -> Adapter:
        """Any folder with files is an adapter."""
        files = sorted(path for path in Path(folder).glob("*") if path.is_file())
        if not files:
            raise WeightsError(f"{folder} has no files")
        found = [path.read_bytes() for path in files]
        digest = sha256(b"".join(sha256(data).digest() for data in found)).hexdigest()[:32]
        return FakeAdapter(digest, sum(map(len, found)))

    def keep(self, adapter: Adapter) -> None:
        """Steps may name it from now on."""
        self._known[adapter.digest] = adapter.nbytes

    def drop(self, digest: str) -> None:
        """No step may name it any more."""
        self._known.pop(digest, None)

    def kept(self) -> Mapping[str, int]:
        """See `AdapterHolder`."""
        return self._known.copy()

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step."""
        return self._thread.submit(self.run, plan)

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute one step now."""
        for load in plan.adapters:
            assert load.digest in self._known, f"adapter {load.name} {load.digest} was never read, or is dropped"
            self._slots[load.slot] = load.digest
        for copy in plan.copies:
            self.block_bytes(copy.target)[:] = self.block_bytes(copy.source)
        for start in plan.starts:
            self._rows[start.row] = _Row(start)
        for grown in plan.grown:
            self._grow(grown)
        late, missing = late_masks.take(plan.late_masks)
        masks = {mask.row: mask.allowed for mask in plan.masks} | {row: (mask,) for row, mask in late.items()}
        drawn: list[RowOutput] = []
        scores: list[PromptScores] = []
        pooled: list[Pooled] = []
        for number, chunk in enumerate(plan.chunks):
            row = self._rows[chunk.row]
            row.salt = adapter_salt(self._slots[row.slot])
            if chunk.drafts:
                row.tokens[chunk.start + chunk.num_tokens - len(chunk.drafts) :] = chunk.drafts
            for group in range(len(self._windows)):
                for position in range(chunk.start, chunk.start + chunk.num_tokens):
                    at = self._at(row, group, position)
                    self._view[at : at + ENTRY_BYTES] = entry_bytes(group, row.tokens[position], position, row.salt)
            if row.wanted >= 0 and chunk.start < row.prompt_len - 1:
                lengths = range(chunk.start + 1, min(chunk.start + chunk.num_tokens, row.prompt_len - 1) + 1)
                told = [_score(self._state(row, n), row.tokens[n], row.wanted) for n in lengths]
                scores.append(PromptScores(number, tuple(told)))
            if row.pooling is not None and chunk.start + chunk.num_tokens == row.prompt_len:
                pooled.append(Pooled(number, _vector(self._state(row, row.prompt_len), row.pooling)))
            if not chunk.draws:
                drawn.append(NOTHING_DRAWN)
                continue
            tokens = self._draw(row, chunk, masks.get(chunk.row, (None,) * chunk.draws))
            if chunk.row in missing:
                drawn.append(NOTHING_DRAWN)
                continue
            # The next token is certain, so it is its own only alternative.
            logprobs = tuple(TokenLogprobs(t, 0.0, ((t, 0.0),)) for t in tokens) if row.sampling.logprobs >= 0 else ()
            drawn.append(RowOutput(tokens, logprobs))
        return StepOutput(plan.step, tuple(drawn), tuple(scores), tuple(pooled))

    def _draw(self, row: _Row, chunk: Chunk, masks: Sequence[bytes | None]) -> tuple[int, ...]:
        """As many tokens as drafts are right, and one."""
        first = chunk.start + chunk.num_tokens - len(chunk.drafts)
        found: list[int] = []
        lengths = range(first, first + chunk.draws)
        for length, draft, mask in zip(lengths, (*chunk.drafts, None), masks, strict=True):
            token = _next(self._state(row, length), row.sampling, length)
            found.append(token if mask is None else _first_allowed(token, mask))
            if found[-1] != draft:
                break
        row.tokens[first:] = found
        return tuple(found)

    def _grow(self, grown: RowBlocks) -> None:
        table = self._rows[grown.row].blocks[grown.group]
        table[grown.index : grown.index + len(grown.block_ids)] = grown.block_ids

    def _at(self, row: _Row, group: int, position: int) -> int:
        block = row.blocks[group][position // self._block_size]
        assert block != 0, f"position {position} of group {group} is in the null block"
        return block * self._block_bytes + position % self._block_size * ENTRY_BYTES

    def _state(self, row: _Row, length: int) -> int:
        """Digest of what the last of `length` positions sees in each group, read through the block tables."""
        states: list[int] = []
        size = self._block_size
        for group, window in enumerate(self._windows):
            state, position = 0, first_visible(window, length)
            while position < length:
                end = min(length, (position // size + 1) * size)
                at = self._at(row, group, position)
                state = crc32(self._view[at : at + (end - position) * ENTRY_BYTES], state)
                position = end
            states.append(state)
        return _state_of(states)

    def block_bytes(self, block_id: int) -> memoryview:
        """The block's bytes, writable: for tests that poison or inspect them."""
        return self._view[block_id * self._block_bytes : (block_id + 1) * self._block_bytes]

    def kv_region(self) -> KvRegion:
        """The pool as plain memory."""
        return self._memory

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
