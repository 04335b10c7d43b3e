"""Sums over the ranks of one host by memory of each other that they have mapped (kernels' `peer_sum`), not by NCCL.

Ranks settle it together, once, at their start: each has GPU, kernels and NVLink for it, has mapped the inboxes of all
others, and has found in its own what the others wrote there. Else all of them stay with NCCL, and the log says why.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from isthmus_kernels import cuda_library, early_launch
from isthmus_kernels.device import multiprocessors
from isthmus_kernels.peer_sum.cuda_impl import (
    EMPTY,
    MOST_RANKS,
    Inboxes,
    inbox_bytes,
    peer_sum,
    peer_sum_add_rms_norm,
    refusal,
)

from ..cuda_calls import checked, has_bindings, runtime
from ..models.shard import Collectives

_LOG = logging.getLogger(__name__)

ROOM = 256 << 10
"""Bytes that a thread block has for one other rank: 33 MiB a call on an H200. More goes in several calls."""
LIMIT = 16 << 20
"""Bytes that one rank of three and more sends to all others, from which on NCCL sums: it sends each
byte twice at most."""
_HANDLE_BYTES = 64
_TOLD_BYTES = 256
_PROBE_BYTES = 256


class PeerSums:
    """`models.shard.Collectives`. Belongs to the thread that launches, and to its stream."""

    parts = True

    def __init__(self, over: Collectives, inboxes: Inboxes, limit: int) -> None:
        """`over` does what cannot be done by these sums, and with more than two ranks what would have each send more
        than `limit` bytes."""
        self._over, self._inboxes = over, inboxes
        ranks = len(inboxes.addresses)
        self._limit = None if ranks == 2 else limit // (ranks - 1)

    def sum(self, x: Tensor) -> None:
        """Sum over the ranks, in place."""
        if self._takes(x):
            for part in x.split(self._inboxes.rows(x)):
                peer_sum(part, self._inboxes)
        else:
            self._over.sum(x)

    def sum_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """Sum, residual addition and norm in one kernel, which rounds once."""
        if not self._takes(residual):
            own = x.sum(0).to(residual.dtype) if x.dim() == 3 else x
            self._over.sum_add_rms_norm(own, residual, weight, eps, out)
            return
        most = self._inboxes.rows(residual)
        for first in range(0, len(residual), most):
            rows = slice(first, first + most)
            peer_sum_add_rms_norm(x[..., rows, :], residual[rows], weight, eps, out[rows], self._inboxes)

    def gather(self, part: Tensor) -> Tensor:
        """By what these sums stand over."""
        return self._over.gather(part)

    def give_up(self) -> None:
        """A rank is lost: end what waits for it. The device is lost to this process then. Any thread."""
        self._inboxes.words[0] = 1

    def overdue(self) -> str:
        """Which rank a sum waited for in vain; empty: none. Any thread."""
        late = int(self._inboxes.words[1]) - 1
        return "" if late < 0 else f"rank {late} did not come to a sum within {self._inboxes.patience_s:g} s"

    def _takes(self, x: Tensor) -> bool:
        fits = refusal(x) is None and self._inboxes.rows(x) > 0
        return fits and (self._limit is None or x.nbytes <= self._limit)


class _Refused(Exception):
    """On every rank, with the reasons of all."""


class _Taken(NamedTuple):
    """What gives back what was taken: mappings of others' memory, and memory."""

    mapped: list[Callable[[], object]]
    made: list[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Exchanges short texts. Every rank makes the same calls."""

    rank: int
    size: int
    group: distributed.ProcessGroup

    def tell(self, text: bytes) -> list[bytes]:
        """Every rank's, by rank, each padded with zeros."""
        own = torch.frombuffer(bytearray(text[:_TOLD_BYTES].ljust(_TOLD_BYTES, b"\0")), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(found, own, group=self.group)
        return [bytes(one.numpy().tobytes()) for one in found]

    def agree(self, problem: str) -> None:
        """Raises _Refused on all when one has a problem."""
        told = [text.rstrip(b"\0").decode(errors="replace") for text in self.tell(problem.encode())]
        if reasons := [f"rank {number}: {reason}" for number, reason in enumerate(told) if reason]:
            raise _Refused("; ".join(reasons))


def open_peer_sums(
    over: Collectives,
    group: distributed.ProcessGroup,
    device: torch.device,
    *,
    patience_s: float,
    limit: int = LIMIT,
    room: int = ROOM,
) -> PeerSums | None:
    """The sums of this rank; None on all ranks, after a line in the log, where one cannot have them.

    `group`: of all ranks, between host memories. The rank's GPU has its number, as `commands.ranks` gives them.
    `patience_s`: so long a rank is waited for in a sum. Every rank calls it alike.
    """
    ranks = _Ranks(group.rank(), group.size(), group)
    taken = _Taken([], [])
    try:
        ranks.agree(_refusal(ranks, device))
        inboxes = _connect(ranks, device, room, patience_s, taken)
    except _Refused as error:
        for close in taken.mapped:
            close()
        ranks.tell(b"")  # what others have mapped is not freed
        for free in taken.made:
            free()
        _LOG.warning("ranks sum by NCCL and not by memory of each other, which takes 2 to 4 times as long: %s", error)
        return None
    _LOG.info(
        "ranks sum by memory of each other over NVLink, for which %d MiB of each GPU are taken",
        inbox_bytes(ranks.size, inboxes.blocks, room) >> 20,
    )
    # A device waits for the link then, and products may begin to read meanwhile.
    early_launch.switch(device, True)
    return PeerSums(over, inboxes, limit)


def _refusal(ranks: _Ranks, device: torch.device) -> str:
    """Why this rank cannot; empty when it can."""
    if device.type != "cuda":
        return "it has no GPU"
    if ranks.size > MOST_RANKS:
        return f"{ranks.size} ranks, of at most {MOST_RANKS}"
    if not cuda_library.available():
        return "the CUDA kernels do not run on its GPU"
    if not has_bindings():
        return "the package cuda-bindings is not installed"
    cuda = runtime()
    native = cuda.cudaDeviceP2PAttr.cudaDevP2PAttrNativeAtomicSupported
    for other in range(ranks.size):
        if other == ranks.rank:
            continue
        try:
            reached = int(checked(cuda.cudaDeviceCanAccessPeer(device.index, other)))
            # Over PCIe they are not.
            if not reached or not int(checked(cuda.cudaDeviceGetP2PAttribute(native, device.index, other))):
                return f"NVLink does not join its GPU to that of rank {other}"
        except RuntimeError as error:
            return f"the GPU of rank {other} is not known: {error}"
    return ""


def _connect(ranks: _Ranks, device: torch.device, room: int, patience_s: float, taken: _Taken) -> Inboxes:
    """Make and map the inboxes. Raises _Refused, with what was made so far in `taken`."""
    cuda = runtime()
    told = ranks.tell(multiprocessors(device).to_bytes(4, "little"))
    blocks = min(int.from_bytes(one[:4], "little") for one in told)
    size = inbox_bytes(ranks.size, blocks, room)
    own, handle, problem = 0, b"", ""
    try:
        checked(cuda.cudaSetDevice(device.index))
        own = int(checked(cuda.cudaMalloc(size)))
        taken.made.append(lambda: cuda.cudaFree(own))
        checked(cuda.cudaMemset(own, EMPTY, size))
        shared = checked(cuda.cudaIpcGetMemHandle(own))
        handle = ctypes.string_at(shared.getPtr(), _HANDLE_BYTES)
        checked(cuda.cudaDeviceSynchronize())
    except RuntimeError as error:
        problem = f"{size >> 20} MiB of its GPU cannot be shared: {error}"
    ranks.agree(problem)

    handles = ranks.tell(handle)
    addresses = [own] * ranks.size
    for other in range(ranks.size):
        if other == ranks.rank or problem:
            continue
        opened = cuda.cudaIpcMemHandle_t()
        ctypes.memmove(opened.getPtr(), handles[other][:_HANDLE_BYTES], _HANDLE_BYTES)
        try:
            addresses[other] = int(checked(cuda.cudaIpcOpenMemHandle(opened, cuda.cudaIpcMemLazyEnablePeerAccess)))
            taken.mapped.append(lambda address=addresses[other]: cuda.cudaIpcCloseMemHandle(address))  # type: ignore[misc]
        except RuntimeError as error:
            problem = f"memory of rank {other} cannot be mapped: {error}"
    ranks.agree(problem)

    # Hosts are known on which one GPU reads nonsense in another's memory.
    for other in range(ranks.size):
        if other != ranks.rank:
            place = ranks.rank if ranks.rank < other else ranks.rank - 1
            problem = problem or _copy(cuda, addresses[other] + place * room, _probe(ranks.rank, other))
    ranks.agree(problem)
    for other in range(ranks.size):
        if other != ranks.rank:
            place = other if other < ranks.rank else other - 1
            found = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
            problem = problem or _copy(cuda, found, own + place * room)
            if not problem and not torch.equal(found, _probe(other, ranks.rank)):
                problem = f"what rank {other} wrote into its memory did not arrive; see that peer access works (IOMMU)"
    try:
        checked(cuda.cudaMemset(own, EMPTY, size))
        checked(cuda.cudaDeviceSynchronize())
    except RuntimeError as error:
        problem = problem or str(error)
    ranks.agree(problem)
    calls = torch.zeros(blocks, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)  # whatever stream the sums are made on
    return Inboxes(
        rank=ranks.rank,
        addresses=tuple(addresses),
        blocks=blocks,
        room=room,
        calls=calls,
        words=torch.zeros(2, dtype=torch.int32, pin_memory=True),
        patience_s=patience_s,
    )


def _probe(writer: int, reader: int) -> Tensor:
    return (torch.arange(_PROBE_BYTES) * 7 + writer * 31 + reader * 3).to(torch.uint8)


def _copy(cuda: Any, target: Tensor | int, source: Tensor | int) -> str:
    """Copies _PROBE_BYTES; why not, or empty."""
    to, of = (one.data_ptr() if isinstance(one, Tensor) else one for one in (target, source))
    try:
        checked(cuda.cudaMemcpy(to, of, _PROBE_BYTES, cuda.cudaMemcpyKind.cudaMemcpyDefault))
    except RuntimeError as error:
        return f"memory of another rank cannot be written: {error}"
    return ""
