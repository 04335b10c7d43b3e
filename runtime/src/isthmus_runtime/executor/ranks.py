"""One executor over several ranks: rank 0 has the scheduler and broadcasts every frozen plan, all ranks run it.

Each rank holds its shard of the weights and of the KV pool, under the same block ids; whatever a step needs of another
rank is a collective inside the model. So a plan is all that travels between schedulers and ranks, and nothing comes
back: rank 0's result is everybody's.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import distributed

from ..errors import ConfigError, EngineFailed
from ..interfaces.steps import Executor, StepOutput, StepPlan
from ..interfaces.transport import KvRegion

_LOG = logging.getLogger(__name__)
# A plain dataclass takes the configuration of what it is in. Late masks are the arbitrary type, and never travel.
_PLAN = TypeAdapter(
    tuple[StepPlan],
    config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", arbitrary_types_allowed=True),
)
_END = -1


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
        self._broken = ""
        agree(local.kv_region(), group)

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step on every rank. The future fails with EngineFailed once a rank is lost."""
        if not self._broken:
            try:
                _send(encode(plan), self._group)
            except RuntimeError as e:
                self._broken = f"a rank of this engine is lost: {str(e).splitlines()[0]}"
                _LOG.error("%s", self._broken)
        if self._broken:
            failed: Future[StepOutput] = Future()
            failed.set_exception(EngineFailed(f"step {plan.step} was not run: {self._broken}"))
            return failed
        # The other ranks have the step: it cannot be taken back any more.
        mine = self._local.submit(plan)
        theirs: Future[StepOutput] = Future()
        theirs.set_running_or_notify_cancel()
        mine.add_done_callback(lambda done: _pass_on(done, theirs))
        return theirs

    def kv_region(self) -> KvRegion:
        """This rank's pool."""
        return self._local.kv_region()

    def close(self) -> None:
        """Let the other ranks end, then this one."""
        if not self._broken:
            try:
                distributed.broadcast(torch.tensor([_END]), 0, group=self._group)
            except RuntimeError as e:
                _LOG.warning("a rank was lost before the end: %s", str(e).splitlines()[0])
        self._local.close()


def _pass_on(done: Future[StepOutput], to: Future[StepOutput]) -> None:
    error = done.exception()
    if error is None:
        to.set_result(done.result())
    else:
        to.set_exception(error)


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
