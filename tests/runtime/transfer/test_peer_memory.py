"""Direct mode over NVLink, where a stand-in for CUDA copies within this process: what is written, and what is refused.

The card's own part is tests/gpu/test_peer_memory.py's.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus_runtime.errors import ConfigError
from isthmus_runtime.interfaces.handoff import BlockRef, ReceiveJob
from isthmus_runtime.interfaces.transport import KvRegion, Piece, TransferResult
from isthmus_runtime.protocol.ticket import Ticket
from isthmus_runtime.transfer import native_engine, peer_memory
from isthmus_runtime.transfer.direct import DirectTransfer
from isthmus_runtime.transfer.peer_memory import IDLE_S, Offer, PeerMemory, StillMoving, batches, shifted
from isthmus_runtime.transfer.transport import DONE, Run

WAIT_S = 20.0
BLOCKS, BLOCK = 16, 1024
OFFER = Offer("0" * 36, "1" * 32, bytes(range(64)), 512, 1 << 40)


class Error(IntEnum):
    cudaSuccess = 0
    cudaErrorNotReady = 600
    cudaErrorInvalidValue = 1


class Handle:
    """Of memory, as bytes."""

    def __init__(self) -> None:
        self.raw = (ctypes.c_ubyte * 64)()

    def getPtr(self) -> int:
        return ctypes.addressof(self.raw)


class Cuda:
    """CUDA's run-time library, for what `PeerMemory` calls: handles hold addresses of this process."""

    cudaError_t = Error
    cudaMemcpyAttributes = SimpleNamespace
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)
    cudaStreamNonBlocking = cudaIpcMemLazyEnablePeerAccess = 1
    cudaEventDisableTiming = 2
    cudaIpcMemHandle_t = Handle

    def __init__(self) -> None:
        self.mapped: list[int] = []
        self.failing = False
        self.stuck = False
        self.read_ms = 0.1
        self._kept: list[Any] = []

    def cudaIpcGetMemHandle(self, base: int) -> tuple[Error, Any]:
        handle = Handle()
        handle.raw[:8] = list(base.to_bytes(8, "little"))
        return Error.cudaSuccess, handle

    def cudaIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Error, int]:
        self.mapped.append(int.from_bytes(bytes(handle.raw[:8]), "little"))
        return Error.cudaSuccess, self.mapped[-1]

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[Error]:
        self.mapped.remove(address)
        return (Error.cudaSuccess,)

    def cudaGetDeviceProperties(self, device: int) -> tuple[Error, Any]:
        return Error.cudaSuccess, SimpleNamespace(uuid=SimpleNamespace(bytes=bytes(16)))

    def cudaMalloc(self, nbytes: int) -> tuple[Error, int]:
        self._kept.append(ctypes.create_string_buffer(nbytes))
        return Error.cudaSuccess, ctypes.addressof(self._kept[-1])

    def cudaMemcpyBatchAsync(
        self, to: tuple[int, ...], source: tuple[int, ...], sizes: tuple[int, ...], count: int, *_: object
    ) -> tuple[Error]:
        if self.failing:
            return (Error.cudaErrorInvalidValue,)
        for one in range(count):
            ctypes.memmove(to[one], source[one], sizes[one])
        return (Error.cudaSuccess,)

    def cudaStreamQuery(self, stream: object) -> tuple[Error]:
        return (Error.cudaErrorNotReady if self.stuck else Error.cudaSuccess,)

    def cudaEventElapsedTime(self, one: object, other: object) -> tuple[Error, float]:
        return Error.cudaSuccess, self.read_ms

    def __getattr__(self, name: str) -> Callable[..., tuple[Error, object]]:
        """Everything else is done at once, and gives something."""
        return lambda *_: (Error.cudaSuccess, object())


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(peer_memory, "runtime", lambda: made)
    monkeypatch.setattr(peer_memory, "_allocation", lambda address: address - 512)
    monkeypatch.setattr(peer_memory, "PROBE_BYTES", 4096)
    # A pool of a few KiB is read in no time.
    monkeypatch.setattr(peer_memory, "FLOOR_GBPS", 0.01)
    return made


class Side:
    """An engine's transfer and its pool, which the stand-in takes for a GPU's."""

    def __init__(self, name: str, fill: int) -> None:
        self.memory = ctypes.create_string_buffer(512 + BLOCKS * BLOCK)
        self.base = ctypes.addressof(self.memory) + 512
        ctypes.memset(self.base, fill, BLOCKS * BLOCK)
        self.region = KvRegion(
            base=self.base, num_blocks=BLOCKS, block_bytes=BLOCK, block_stride=BLOCK, layout_digest="L", device="cuda:0"
        )
        self.transfer = DirectTransfer(host="127.0.0.1", epoch=name, transport="nvlink")
        self.transfer.prepare(self.region, WAIT_S)

    def block(self, number: int) -> bytes:
        return ctypes.string_at(self.base + number * BLOCK, BLOCK)


@pytest.fixture
def sides(cuda: Cuda) -> Iterator[tuple[Side, Side]]:
    made = Side("prefill", 1), Side("decode", 0)
    yield made
    for side in made:
        side.transfer.close()


def reserve(decode: Side, blocks: tuple[int, ...]) -> Ticket:
    refs = tuple(BlockRef(index=i, block_id=block, key=f"k{i}", group=0) for i, block in enumerate(blocks))
    job = ReceiveJob(
        request_id="r", attempt="a", skip_blocks=0, blocks=refs, num_tokens=16 * len(blocks), peer_url="",
        peer_epoch="", deadline_s=time.monotonic() + 60,
    )  # fmt: skip
    return decode.transfer.reserve(job, "L")


def write(prefill: Side, ticket: Ticket, pairs: list[tuple[int, int]], record: bytes | None = None) -> TransferResult:
    """Blocks (here, there), then the record."""
    found: list[TransferResult] = []
    ended = threading.Event()

    def done(result: TransferResult) -> None:
        found.append(result)
        ended.set()

    pieces = [
        Piece(block_id=here, key="k", nbytes=BLOCK, remote_address=ticket.pool_base + there * ticket.block_stride)
        for here, there in pairs
    ]
    prefill.transfer.expect(ticket)
    prefill.transfer.write("a", ticket, pieces, record, WAIT_S, done)
    assert ended.wait(2 * WAIT_S)
    return found[0]


@pytest.mark.slow
def test_blocks_are_copied_and_the_record_follows(sides: tuple[Side, Side], cuda: Cuda) -> None:
    prefill, decode = sides
    for number in range(BLOCKS):
        ctypes.memset(prefill.base + number * BLOCK, 16 + number, BLOCK)
    ticket = reserve(decode, (3, 4, 9))
    assert prefill.transfer.effective().transport == "nvlink" and prefill.transfer.effective().gbps == 0
    result = write(prefill, ticket, [(5, 3), (6, 4), (1, 9)], b"the record")
    assert result.ok and result.settled and result.moved_bytes == 3 * BLOCK
    assert [decode.block(n)[0] for n in (3, 4, 9)] == [21, 22, 17]
    assert all(not any(decode.block(n)) for n in range(BLOCKS) if n not in (3, 4, 9))
    read: list[TransferResult] = []
    came = threading.Event()
    decode.transfer.read("a", (), WAIT_S, lambda result: (read.append(result), came.set())[0])
    assert came.wait(WAIT_S) and read[0].record is not None and read[0].record.startswith(b"the record")
    assert prefill.transfer.effective().gbps > 0, "the peer was measured"
    assert len(cuda.mapped) == 1
    prefill.transfer.close()
    assert not cuda.mapped


@pytest.mark.slow
def test_a_target_beyond_the_pool_is_not_written(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    result = write(prefill, reserve(decode, (3,)), [(5, BLOCKS)])
    assert not result.ok and "not in the peer's" in result.reason


@pytest.mark.slow
def test_another_host_is_refused(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> None:
    prefill, decode = sides
    monkeypatch.setattr(peer_memory, "_host", lambda: "f" * 36)
    result = write(prefill, reserve(decode, (3,)), [(5, 3)])
    assert not result.ok and "another host" in result.reason and not cuda.mapped


@pytest.mark.slow
def test_what_is_read_slowly_is_not_called_nvlink(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, cuda: Cuda
) -> None:
    prefill, decode = sides
    monkeypatch.setattr(peer_memory, "FLOOR_GBPS", 60.0)
    cuda.read_ms = 4096 / 55e6  # as over PCIe
    result = write(prefill, reserve(decode, (3,)), [(5, 3)])
    assert not result.ok and "55.0 GB/s" in result.reason
    assert not cuda.mapped and not any(decode.block(3)), "what was mapped to look at it is given back, unwritten"
    cuda.read_ms = 4096 / 300e6
    again = write(prefill, reserve(decode, (4,)), [(5, 4)])
    assert not again.ok and "55.0 GB/s" in again.reason, "it is not looked at again for each batch"
    memory = prefill.transfer._native.memory if prefill.transfer._native else None
    assert memory is not None
    memory._refused.clear()
    assert write(prefill, reserve(decode, (4,)), [(5, 4)]).ok


@pytest.mark.slow
def test_a_copy_that_cannot_be_submitted_ends_its_own_write(sides: tuple[Side, Side], cuda: Cuda) -> None:
    prefill, decode = sides
    assert write(prefill, reserve(decode, (3,)), [(5, 3)]).ok
    cuda.failing = True
    result = write(prefill, reserve(decode, (4,)), [(5, 4)])
    assert not result.ok and "cudaErrorInvalidValue" in result.reason
    cuda.failing = False
    assert write(prefill, reserve(decode, (4,)), [(5, 4)]).ok


@pytest.mark.slow
def test_both_sides_have_the_same_transport(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    plain = reserve(decode, (3,)).model_copy(update={"mapping": ""})
    with pytest.raises(ValueError, match="decode does not take KV over NVLink, and this prefill sends it over nvlink"):
        write(prefill, plain, [(5, 3)])


def test_a_gpu_that_does_not_end_a_copy_holds_nobody_up(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """All peers wait for this thread; and what may still be read or written is not unmapped."""
    monkeypatch.setattr(peer_memory, "STUCK_S", 0.01)
    pool = ctypes.create_string_buffer(512 + BLOCKS * BLOCK)
    base = ctypes.addressof(pool) + 512
    region = KvRegion(
        base=base, num_blocks=BLOCKS, block_bytes=BLOCK, block_stride=BLOCK, layout_digest="L", device="cuda:0"
    )
    memory = PeerMemory(region, time.monotonic)
    batch = batches([Run(base, base + BLOCK, BLOCK)])[0]
    cuda.stuck = True
    with pytest.raises(ValueError, match="was not read within"):
        memory.submit(memory.offer, base, batch)
    assert len(cuda.mapped) == 1
    cuda.stuck = False
    memory._refused.clear()
    assert memory.submit(memory.offer, base, batch).status() == DONE
    cuda.failing = cuda.stuck = True
    with pytest.raises(StillMoving):
        memory.submit(memory.offer, base, batch)
    monkeypatch.setattr(peer_memory, "IDLE_S", 0.0)
    assert memory.tidy() and len(cuda.mapped) == 2


def test_an_idle_mapping_is_closed(cuda: Cuda) -> None:
    """The memory of a process that has ended is its successor's."""
    now = 0.0
    pool = ctypes.create_string_buffer(512 + BLOCKS * BLOCK)
    base = ctypes.addressof(pool) + 512
    region = KvRegion(
        base=base, num_blocks=BLOCKS, block_bytes=BLOCK, block_stride=BLOCK, layout_digest="L", device="cuda:0"
    )
    memory = PeerMemory(region, lambda: now)
    other = batches([Run(base, base + BLOCK, BLOCK)])[0]
    copy = memory.submit(memory.offer, base, other)
    now = IDLE_S
    assert memory.tidy() and cuda.mapped, "nobody has seen the end of the copy yet"
    assert copy.status() == DONE
    memory.submit(memory.offer, base, other).status()
    now += IDLE_S - 0.1
    assert memory.tidy() and len(cuda.mapped) == 1
    now += 0.1
    assert not memory.tidy() and not cuda.mapped
    memory.close()


def test_offers_are_read_as_they_were_written() -> None:
    assert Offer.read(OFFER.text()) == OFFER
    for text in ("", "tcp", OFFER.text()[1:], OFFER.text().replace("/512/", "/-1/"), OFFER.text() + "\n"):
        with pytest.raises(ValueError, match="no offer"):
            Offer.read(text)
    fields = {"mode": "direct", "attempt": "a", "layout_digest": "L"}
    offered = Ticket.model_validate({**fields, "mapping": OFFER.text()})
    assert Ticket.model_validate_json(offered.model_dump_json()) == offered and offered.mapping
    assert "mapping" not in Ticket.model_validate(fields).model_dump_json(), "older engines refuse it"
    with pytest.raises(ValueError, match="mapping"):
        Ticket.model_validate({**fields, "mapping": "no offer"})


def test_runs_are_shifted_and_none_leaves_the_pool() -> None:
    assert shifted([Run(7, 100, 10), Run(8, 190, 10)], 100, 5000, 100) == [Run(7, 5000, 10), Run(8, 5090, 10)]
    for target in (99, 91 + 100, 2**63):
        with pytest.raises(ValueError, match="not in the peer's"):
            shifted([Run(7, target, 10)], 100, 5000, 100)


def test_batches_keep_the_order_and_a_size() -> None:
    runs = [Run(i, i, size) for i, size in enumerate((5, 5, 1, 20, 3))]
    made = batches(runs, 10)
    assert [batch.nbytes for batch in made] == [10, 1, 20, 3]
    assert [run for batch in made for run in batch.runs] == runs
    assert batches([], 10) == []


def test_nvlink_needs_the_package_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "available", lambda: False)
    region = KvRegion(base=4096, num_blocks=1, block_bytes=64, block_stride=64, layout_digest="L", device="cuda:0")
    with pytest.raises(ConfigError, match="cuda-bindings"):
        PeerMemory(region, time.monotonic)
    assert not peer_memory.reaches_a_peer("cuda:0") and not peer_memory.reaches_a_peer("cpu")
    assert native_engine.reaches_a_peer is peer_memory.reaches_a_peer
