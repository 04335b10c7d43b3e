"""One executor over several ranks: rank 0 has the scheduler and broadcasts every frozen plan, all ranks run it.

Each rank holds its shard of the weights and of the KV pool, under the same block ids; whatever a step needs of another
rank is a collective inside the model (`Collected`). So a plan is all that travels between schedulers and ranks, and
nothing comes back: rank 0's result is everybody's.

Plans travel between host memories (gloo), in the order of submission and on a group of their own: a step that runs
meanwhile has its collectives on another.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import distributed

from ..errors import ConfigError, EngineFailed
from ..interfaces.steps import Executor, StepOutput, StepPlan
from ..interfaces.transport import KvRegion
from ..models.shard import Shard

_LOG = logging.getLogger(__name__)
# A plain dataclass takes the configuration of what it is in. Late masks are the arbitrary type, and never travel.
_PLAN = TypeAdapter(
    tuple[StepPlan],
    config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", arbitrary_types_allowed=True),
)
_END = -1
_IDLE = timedelta(days=3650)
"""For a plan ranks wait without a limit: an engine may be idle for long. Whoever starts them ends them."""


class Collected:
    """`models.shard.Collectives` over a group: gloo between CPUs, NCCL between GPUs."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def sum(self, x: torch.Tensor) -> None:
        """In place. Both libraries reduce each element once and hand the result round: the same bits on every rank."""
        distributed.all_reduce(x, group=self._group)

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

    def each(self, number: int) -> tuple[int, ...]:
        """Every rank's `number`, by rank. Every rank calls it."""
        own = torch.tensor([number], dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.shard.size)]
        distributed.all_gather(found, own, group=self.plans)
        return tuple(int(one) for one in found)


def join(rank: int, size: int, meeting: str, device: torch.device, timeout_s: float) -> Ranks:
    """Meet the other ranks at the file `meeting`, which nobody used before. Every rank calls it, in any order.

    `timeout_s` bounds the meeting, and later each collective of a step.
    """
    timeout = timedelta(seconds=timeout_s)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timeout)
    steps = distributed.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    plans = distributed.new_group(backend="gloo", timeout=_IDLE)
    assert isinstance(steps, distributed.ProcessGroup) and isinstance(plans, distributed.ProcessGroup)
    return Ranks(Shard(rank, size, Collected(steps)), plans)


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

    def __init__(self, local: Executor, group: distributed.ProcessGroup | None = None) -> None:
        """Raises ConfigError when the ranks do not agree on their pools."""
        self._local = local
        self._group = group
        self._changed = threading.Lock()
        self._broken = ""
        self._running: dict[int, Future[StepOutput]] = {}
        agree(local.kv_region(), group)

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step on every rank. The future fails with EngineFailed once a rank is lost."""
        # The other ranks get the step: it cannot be taken back any more.
        promised: Future[StepOutput] = Future()
        promised.set_running_or_notify_cancel()
        if not self._broken:
            try:
                _send(encode(plan), self._group)
            except RuntimeError as e:
                self.lost(str(e).splitlines()[0])
        with self._changed:
            broken = self._broken
            if not broken:
                self._running[plan.step] = promised
        if broken:
            promised.set_exception(EngineFailed(f"step {plan.step} was not run: {broken}"))
            return promised
        self._local.submit(plan).add_done_callback(lambda done: self._ended(plan.step, done))
        return promised

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
            promised.set_exception(error)

    @property
    def broken(self) -> bool:
        """Whether a rank was lost: the others may not have been told to end."""
        return bool(self._broken)

    def kv_region(self) -> KvRegion:
        """This rank's pool."""
        return self._local.kv_region()

    def close(self) -> None:
        """Let the other ranks end, then this one."""
        if not self._broken:
            try:
                distributed.broadcast(torch.tensor([_END]), 0, group=self._group)
            except RuntimeError as e:
                self.lost(str(e).splitlines()[0])
        self._local.close()


def follow(local: Executor, group: distributed.ProcessGroup | None = None) -> None:
    """Run what rank 0 broadcasts, until it ends. Raises what a step of this rank raised, or ConfigError (`agree`)."""
    agree(local.kv_region(), group)
    newest: Future[StepOutput] | None = None
    while (data := _receive(group)) is not None:
        if newest is not None and newest.done():
            newest.result()
        newest = local.submit(decode(data))
    if newest is not None:
        newest.result()


def _send(data: bytes, group: distributed.ProcessGroup | None) -> None:
    distributed.broadcast(torch.tensor([len(data)]), 0, group=group)
    distributed.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=group)


def _receive(group: distributed.ProcessGroup | None) -> bytes | None:
    length = torch.empty(1, dtype=torch.int64)
    distributed.broadcast(length, 0, group=group)
    if int(length) == _END:
        return None
    data = torch.empty(int(length), dtype=torch.uint8)
    distributed.broadcast(data, 0, group=group)
    return data.numpy().tobytes()


def _digest_words(digest: str) -> list[int]:
    """A digest of 16 hex digits as two words that int64 holds."""
    return [int(digest[:8], 16), int(digest[8:16], 16)]


def _digest_text(words: torch.Tensor) -> str:
    return "".join(f"{int(word):08x}" for word in words)
