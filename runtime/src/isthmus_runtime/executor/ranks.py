"""One executor over several ranks: rank 0 has the scheduler and broadcasts every frozen plan, all ranks run it.

Each rank holds its shard of the weights and of the KV pool, under the same block ids; whatever a step needs of another
rank is a collective inside the model (`Collected`). So a plan is all that travels between schedulers and ranks, and
nothing comes back: rank 0's result is everybody's.

Plans travel between host memories (gloo), in the order of submission and on a group of their own: a step that runs
meanwhile has its collectives on another. Low-rank adapters travel among them, as the files that the first rank read:
each rank lays out its part, and steps may name an adapter as soon as its files are on their way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from time import monotonic

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import distributed

from isthmus_kernels import dispatch

from ..checkpoints.peft import AdapterFiles
from ..errors import ConfigError, EngineFailed
from ..interfaces.steps import Adapter, Executor, StepOutput, StepPlan
from ..interfaces.transport import KvRegion
from ..models.shard import Shard
from .adapters import AdapterSlots, HostAdapter
from .peer_sums import ROOM, open_peer_sums

_LOG = logging.getLogger(__name__)
MEETING_S = 600.0
"""For processes to start, from a slow disk as well. Who waits for an engine has a bound of its own."""
# A plain dataclass takes the configuration of what it is in. Late masks are the arbitrary type, and never travel.
_PLAN = TypeAdapter(
    tuple[StepPlan],
    config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", arbitrary_types_allowed=True),
)
_IDLE = timedelta(days=3650)
"""For a plan ranks wait without a limit: an engine may be idle for long. Whoever starts them ends them."""
_PATIENCE_S = 120.0
"""The first rank's, with one that does not take what it says."""


class _Kind(IntEnum):
    """What the first rank says. Each has two texts."""

    END = 0
    PLAN = 1
    KEEP = 2
    """The two files of an adapter."""
    DROP = 3
    """The digest of one."""


class Collected:
    """`models.shard.Collectives` over a group: gloo between CPUs, NCCL between GPUs."""

    parts = False

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def sum(self, x: torch.Tensor) -> None:
        """Sum over the ranks, in place. Both libraries reduce each element once and hand the result round: every
        rank has the same bits."""
        distributed.all_reduce(x, group=self._group)

    def sum_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """The sum is rounded before it is added."""
        self.sum(x)
        dispatch.add_rms_norm(x, residual, weight, eps, out=out)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[size, *part.shape], by rank."""
        size = self._group.size()
        parts = part.new_empty((size * part.shape[0], *part.shape[1:]))
        distributed.all_gather_into_tensor(parts, part, group=self._group)
        return parts.view(size, *part.shape)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks of an engine."""

    shard: Shard
    plans: distributed.ProcessGroup
    """On which plans travel."""
    sums: str
    """How a step's sums are made: `peer`, by memory of each other, or the library's name, `nccl` or `gloo`."""
    give_up: Callable[[], None] = lambda: None
    """A rank is lost: end what waits for it in a sum, if that can be. Any thread."""
    overdue: Callable[[], str] = lambda: ""
    """Which rank a sum of this one waited for in vain; empty: none."""

    def each(self, number: int) -> tuple[int, ...]:
        """Every rank's `number`, by rank. Every rank calls it."""
        own = torch.tensor([number], dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.shard.size)]
        distributed.all_gather(found, own, group=self.plans)
        return tuple(int(one) for one in found)


def join(
    rank: int,
    size: int,
    meeting: str,
    device: torch.device,
    timeout_s: float,
    *,
    peer_sums: bool = True,
    room: int = ROOM,
    patience_s: float | None = None,
) -> Ranks:
    """Meet the other ranks at the file `meeting`, which nobody used before. Every rank calls it alike, in any order.

    `timeout_s` bounds each collective of a step. `peer_sums` False: the library makes all sums; `room` and `patience_s`
    (`timeout_s` by default): of `peer_sums`. ConfigError: the others have not come within MEETING_S.
    """
    timeout, most = timedelta(seconds=timeout_s), timedelta(seconds=MEETING_S)
    try:
        distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=most
        )
    except RuntimeError as error:
        raise ConfigError(
            f"--tensor-parallel-size {size}: rank {rank} has not met all others within {MEETING_S:g} s ({error}); "
            "their log lines say why, or the machine is too busy to start them"
        ) from error
    library = "nccl" if device.type == "cuda" else "gloo"
    steps = distributed.new_group(backend=library, timeout=timeout)
    plans = distributed.new_group(backend="gloo", timeout=_IDLE)
    assert isinstance(steps, distributed.ProcessGroup) and isinstance(plans, distributed.ProcessGroup)
    collected = Collected(steps)
    if peer_sums and device.type == "cuda":
        patience_s = timeout_s if patience_s is None else patience_s
        if found := open_peer_sums(collected, plans, device, patience_s=patience_s, room=room):
            return Ranks(Shard(rank, size, found), plans, "peer", found.give_up, found.overdue)
    return Ranks(Shard(rank, size, collected), plans, library)


def encode(plan: StepPlan) -> bytes:
    """A plan as JSON. Ranks exchange text, never objects."""
    assert not plan.late_masks, "a scheduler of several ranks plans a row after its mask"
    return _PLAN.dump_json((plan,))


def decode(data: bytes) -> StepPlan:
    """The plan that was encoded. ValueError for anything else."""
    return _PLAN.validate_json(data)[0]


def agree(region: KvRegion, group: distributed.ProcessGroup | None = None) -> None:
    """Check that all ranks have pools of as many blocks in the same layout: a plan's block ids mean the same on each.

    Every rank calls it. ConfigError on every rank, naming each rank's values, when they differ.
    """
    own = torch.tensor([region.num_blocks, *_digest_words(region.layout_digest)], dtype=torch.int64)
    found = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(found, own, group=group)
    if any(not torch.equal(other, own) for other in found):
        listed = "; ".join(
            f"rank {number} has {int(words[0])} blocks of layout {_digest_text(words[1:])}"
            for number, words in enumerate(found)
        )
        raise ConfigError(
            f"the ranks of this engine do not agree on their KV pool: {listed}; give all the same model, --block-size, "
            "--kv-dtype, --kv-layout and --num-blocks-override"
        )


class LeadingExecutor:
    """`interfaces.steps.Executor` of rank 0. Its other ranks run `follow` over the same group."""

    def __init__(
        self,
        local: Executor,
        group: distributed.ProcessGroup | None = None,
        overdue: Callable[[], str] = lambda: "",
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`overdue`: why a step of this rank failed, where another one is the cause; a rank that has not taken a plan
        after `patience_s` is lost. Raises ConfigError when the ranks do not agree on their pools."""
        self._local = local
        self._group = group
        self._overdue = overdue
        self._patience_s = patience_s
        self._changed = threading.Lock()
        self._broken = ""
        self._running: dict[int, Future[StepOutput]] = {}
        agree(local.kv_region(), group)

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step on every rank. The future fails with EngineFailed once a rank is lost."""
        # The other ranks get the step: it cannot be taken back any more.
        promised: Future[StepOutput] = Future()
        promised.set_running_or_notify_cancel()
        self.tell(_Kind.PLAN, encode(plan))
        with self._changed:
            broken = self._broken
            if not broken:
                self._running[plan.step] = promised
        if broken:
            promised.set_exception(EngineFailed(f"step {plan.step} was not run: {broken}"))
            return promised
        self._local.submit(plan).add_done_callback(lambda done: self._ended(plan.step, done))
        return promised

    def tell(self, kind: _Kind, first: bytes = b"", second: bytes = b"") -> None:
        """Say something to the other ranks, unless one is lost. The engine's thread, which looks at no step meanwhile:
        a rank that stands still takes nothing."""
        if self._broken:
            return
        until = monotonic() + self._patience_s
        for part in _message(kind, first, second):
            try:
                sent = distributed.broadcast(part, 0, group=self._group, async_op=True)
            except RuntimeError as e:
                self.lost(str(e).splitlines()[0])
                return
            assert sent is not None, "a rank sends to a group that it is not in"
            try:
                sent.wait(timedelta(seconds=max(0.001, until - monotonic())))  # zero would be no limit
            except RuntimeError as e:
                late = f"it did not take what it was told within {self._patience_s:g} s (--no-progress-timeout)"
                self.lost(str(e).splitlines()[0] if sent.is_completed() else late)
                return

    def lost(self, reason: str) -> None:
        """A rank is gone, and with it every step that runs: its collectives may wait for it for long. Any thread."""
        with self._changed:
            if self._broken:
                return
            self._broken = f"a rank of this engine is lost: {reason}"
            running, self._running = self._running, {}
        _LOG.error("%s", self._broken)
        for step, promised in running.items():
            promised.set_exception(EngineFailed(f"step {step} has no result: {self._broken}"))

    def _ended(self, step: int, done: Future[StepOutput]) -> None:
        with self._changed:
            promised = self._running.pop(step, None)
        if promised is None:
            return  # it failed with the rank
        error = done.exception()
        if error is None:
            promised.set_result(done.result())
        else:
            because = self._overdue()
            promised.set_exception(EngineFailed(f"{because}: {error}") if because else error)

    @property
    def broken(self) -> bool:
        """Whether a rank was lost: the others may not have been told to end."""
        return bool(self._broken)

    def kv_region(self) -> KvRegion:
        """This rank's pool."""
        return self._local.kv_region()

    def close(self) -> None:
        """Let the other ranks end, then this one."""
        self.tell(_Kind.END)
        self._local.close()


@dataclass(frozen=True, slots=True)
class _ReadAdapter:
    """`interfaces.steps.Adapter` that the other ranks do not have yet."""

    own: HostAdapter
    files: AdapterFiles

    @property
    def digest(self) -> str:
        return self.own.digest

    @property
    def nbytes(self) -> int:
        return self.own.nbytes


class LeadingAdapters:
    """`interfaces.steps.AdapterHolder` of rank 0: its own slots, and those of the others."""

    def __init__(self, local: AdapterSlots, leader: LeadingExecutor) -> None:
        self._local, self._leader = local, leader

    def read(self, folder: str) -> Adapter:
        """Read and check it, for all ranks. Any thread. Raises WeightsError."""
        files = self._local.files(folder)
        return _ReadAdapter(self._local.lay_out(files), files)

    def keep(self, adapter: Adapter) -> None:
        """Have it on every rank."""
        assert isinstance(adapter, _ReadAdapter)
        files = adapter.files
        self._local.keep(adapter.own)
        self._leader.tell(_Kind.KEEP, files.config, files.weights)

    def drop(self, digest: str) -> None:
        """Forget it on every rank."""
        self._local.drop(digest)
        self._leader.tell(_Kind.DROP, digest.encode())

    def kept(self) -> Mapping[str, int]:
        """The adapters of this rank, as every other one has them."""
        return self._local.kept()


def follow(
    local: Executor, group: distributed.ProcessGroup | None = None, adapters: AdapterSlots | None = None
) -> None:
    """Run what rank 0 broadcasts, until it ends. Raises what a step of this rank raised, or ConfigError (`agree`)."""
    agree(local.kv_region(), group)
    newest: Future[StepOutput] | None = None
    while (kind := (said := _receive(group))[0]) is not _Kind.END:
        if newest is not None and (newest.done() or kind is _Kind.DROP):
            newest.result()  # its adapters are in their slots
        if kind is _Kind.PLAN:
            newest = local.submit(decode(said[1]))
            continue
        assert adapters is not None, "the first rank has adapters and this one has no slots"
        if kind is _Kind.KEEP:
            adapters.keep(adapters.lay_out(AdapterFiles(Path("the first rank's"), said[1], said[2])))
        else:
            adapters.drop(said[1].decode())
    if newest is not None:
        newest.result()


def _message(kind: _Kind, first: bytes, second: bytes) -> list[torch.Tensor]:
    """What `_receive` takes, part by part."""
    texts = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (first, second) if data]
    return [torch.tensor([kind, len(first), len(second)]), *texts]


def _receive(group: distributed.ProcessGroup | None) -> tuple[_Kind, bytes, bytes]:
    head = torch.empty(3, dtype=torch.int64)
    distributed.broadcast(head, 0, group=group)
    kind, *lengths = head.tolist()
    texts = [torch.empty(length, dtype=torch.uint8) for length in lengths]
    for text in texts:
        if len(text):
            distributed.broadcast(text, 0, group=group)
    first, second = (text.numpy().tobytes() for text in texts)
    return _Kind(kind), first, second


def _digest_words(digest: str) -> list[int]:
    """A digest of 16 hex digits as two words that int64 holds."""
    return [int(digest[:8], 16), int(digest[8:16], 16)]


def _digest_text(words: torch.Tensor) -> str:
    return "".join(f"{int(word):08x}" for word in words)
