"""The ranks of a tensor-parallel engine: one process each. The first serves, starts the others and ends with them.

`load_engine` starts `isthmus-runtime rank` for each other rank. All load their part of the weights, agree on the KV
plan and make an executor; then the first sends its plans (`executor/ranks.py`), and the others follow.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from ..collecting import spare_collector
from ..config import EngineConfig, apply_native_environment
from ..errors import EngineFailed
from ..executor.device.base import Device
from ..executor.device.cpu import usable_threads
from ..executor.device.select import open_device
from ..executor.loading import LoadedModel, load
from ..executor.model_runner import TorchExecutor
from ..executor.ranks import LeadingAdapters, LeadingExecutor, Ranks, follow, join
from ..interfaces.steps import AdapterHolder, Executor, StepOutput, StepPlan
from ..interfaces.transport import KvRegion
from ..kv.plan import KvPlan
from ..models.base import check_shards
from ..models.registry import read_model_spec
from ..transfer.other_ranks import OtherRank
from ..transfer.rank_lines import channel
from ..transfer.rank_mover import RankMover
from .pool_plan import plan_pool

log = logging.getLogger(__name__)

_END_TIMEOUT_S = 30.0
_MARGIN = 64 << 20
"""One start takes a little more or less than the one before it."""
_NOT_MOVED = "this rank's KV cannot be moved any more: it ends, and the engine with it"
_PART = b"part\n"
"""From the first rank: the end has been announced to all, so they end by themselves."""


@dataclass(frozen=True, slots=True)
class _Order:
    """What a rank is told."""

    config: EngineConfig
    rank: int
    meeting: str
    mover: int | None = None
    """The descriptor by which the first rank says what KV it moves; None: it moves none."""


_ORDERS = TypeAdapter(_Order)


class Followers:
    """The processes of ranks 1 and up. They end with this one: their standard input is a pipe that it holds."""

    def __init__(self, config: EngineConfig) -> None:
        """Start them."""
        self._folder = tempfile.TemporaryDirectory(prefix="isthmus-ranks-")
        self.meeting = str(Path(self._folder.name) / "meeting")
        self._on_lost: Callable[[str], None] = _end_process
        self._ending = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self.movers: list[OtherRank] = []
        """What moves their KV, in Direct mode."""
        for rank in range(1, config.tensor_parallel_size):
            command = [sys.executable, "-m", "isthmus_runtime", "rank"]
            order, inherited = _Order(config, rank, self.meeting), []
            if config.transfer.mode == "direct":
                ours, theirs = channel()
                self.movers.append(OtherRank(rank, ours))
                order, inherited = replace(order, mover=theirs.fileno()), [theirs]
            # A session of its own: Ctrl-C is for the first, which lets requests finish.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[end.fileno() for end in inherited]
            )
            for end in inherited:
                end.close()
            assert process.stdin is not None
            process.stdin.write(_ORDERS.dump_json(order) + b"\n")
            process.stdin.flush()
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call this from now on, from any thread, when one has ended too early. Until then this process ends too."""
        self._on_lost = on_lost

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Within, they are told to end; then wait for it, or end them."""
        self._ending = True
        try:
            yield
        finally:
            for process in self._processes:
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # it has ended
                    process.stdin.close()
                try:
                    status = process.wait(_END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    log.error("rank process %d did not end within %.0f s and is killed", process.pid, _END_TIMEOUT_S)
                    process.kill()
                else:
                    log.log(logging.WARNING if status else logging.DEBUG, "a rank ended with status %d", status)
            self._folder.cleanup()

    def part(self) -> None:
        """All have been told to end: the end of this process is no reason for them to hurry."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(_PART)
                process.stdin.flush()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._ending:
            self._on_lost(f"the process of rank {rank} ended with status {status}; its log lines say why")


class RankedExecutor:
    """`interfaces.steps.Executor` over the ranks: this process's, and the others' processes."""

    def __init__(self, leader: LeadingExecutor, followers: Followers, give_up: Callable[[], None]) -> None:
        """`give_up`: of this process's `Ranks`."""
        self._leader, self._followers, self._give_up = leader, followers, give_up
        followers.watch(self._lost)

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step on every rank."""
        return self._leader.submit(plan)

    def _lost(self, reason: str) -> None:
        self._leader.lost(reason)
        self._give_up()

    def kv_region(self) -> KvRegion:
        """This rank's pool."""
        return self._leader.kv_region()

    def close(self) -> None:
        """End all ranks."""
        with self._followers.ending():
            self._leader.close()
            if not self._leader.broken:
                self._followers.part()


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A model with its KV plan and what runs its steps."""

    model: LoadedModel
    plan: KvPlan
    executor: Executor
    adapters: AdapterHolder | None
    rank_sums: str = ""
    """How its ranks sum (`executor.ranks.Ranks`); empty: there is one."""
    other_ranks: Sequence[OtherRank] = ()
    """What moves the KV of the others, in Direct mode."""


def load_engine(config: EngineConfig) -> LoadedEngine:
    """The model on all its ranks. Raises WeightsError or ConfigError where this rank cannot have its part."""
    if config.tensor_parallel_size == 1:
        model = load(config.model, config.scheduler, lora=config.lora)
        return with_pool(config, model, config.kv.memory_fraction, lambda number: (number,))
    check_shards(read_model_spec(config.model.path), config.tensor_parallel_size)
    followers = Followers(config)
    own, ranks = _load_rank(_Order(config, 0, followers.meeting))
    patience_s = config.server.no_progress_timeout_s
    leader, slots = LeadingExecutor(own.executor, ranks.plans, ranks.overdue, patience_s), own.model.adapters
    adapters = None if slots is None else LeadingAdapters(slots, leader)
    executor = RankedExecutor(leader, followers, ranks.give_up)
    return replace(own, executor=executor, adapters=adapters, rank_sums=ranks.sums, other_ranks=followers.movers)


def rank_main() -> int:
    """`isthmus-runtime rank`: compute what the first rank says, until it says the end or is gone."""
    order = _ORDERS.validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_first, name="first-rank", daemon=True).start()
    logging.basicConfig(
        level=order.config.server.log_level.upper(),
        format=f"%(asctime)s %(levelname)s rank {order.rank} %(name)s: %(message)s",
        stream=sys.stderr,
    )
    own, ranks = _load_rank(order)
    mover = None
    if order.mover is not None:
        theirs = socket.socket(fileno=order.mover)
        mover = RankMover(theirs, own.executor.kv_region(), order.config.transfer, partial(_end_process, _NOT_MOVED))
    spare_collector()  # all ranks wait for the one that stands still
    try:
        follow(own.executor, ranks.plans, own.model.adapters)
    except EngineFailed:
        if because := ranks.overdue():
            log.critical("%s", because)
        raise
    if mover is not None:
        mover.close()
    own.executor.close()
    return 0


def _load_rank(order: _Order) -> tuple[LoadedEngine, Ranks]:
    config, size = order.config, order.config.tensor_parallel_size
    # They are on one host, and talk to nobody else; neither library asks who connects.
    apply_native_environment({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"})
    threads = config.model.threads or max(1, usable_threads(0) // size)
    alike = config.model.deterministic
    device = open_device(config.model.device, threads=threads, index=order.rank, deterministic=alike)
    device.enter()
    ranks = join(order.rank, size, order.meeting, device.torch_device, config.server.no_progress_timeout_s)
    model = load(config.model, config.scheduler, device=device, shard=ranks.shard, lora=config.lora)
    # Ranks on CPUs share the memory of their host.
    share = config.kv.memory_fraction / (size if device.name == "cpu" else 1)
    return with_pool(config, model, share, ranks.each), ranks


def with_pool(
    config: EngineConfig, model: LoadedModel, fraction: float, each: Callable[[int], tuple[int, ...]]
) -> LoadedEngine:
    """Plan the pool and make the executor. Where its graphs and steps turn out to take more than was set aside, so that
    the process is above `fraction` of its GPU, once again with a smaller pool.

    `each`: every rank's number, of this rank's; all ranks call it alike. Raises ConfigError where nothing fits.
    """
    limited = config.kv.memory_bytes is None and config.kv.num_blocks_override is None
    beside = model.draw_bytes(config.scheduler)
    made = _with_pool(config, model, each(_available(config, model.device, fraction, beside)))
    if not limited or not (over := max(each(model.device.overdrawn(fraction)))):
        return made
    log.warning("graphs and steps take %.2f GiB more than was set aside: again with a smaller pool", over / 2**30)
    made.executor.close()
    # What it held besides, too, is to go before memory is measured.
    del made
    gc.collect()
    made = _with_pool(config, model, each(_available(config, model.device, fraction, beside + over + _MARGIN)))
    if over := max(each(model.device.overdrawn(fraction))):
        log.warning(
            "%.2f GiB more are taken than --kv-memory-fraction (gpuMemoryFraction) allows: do other processes use this "
            "GPU? Lower it to leave them room",
            over / 2**30,
        )
    return made


def _available(config: EngineConfig, device: Device, fraction: float, beside: int) -> int:
    """Bytes for the pool of one rank."""
    return device.kv_bytes(fraction, beside) if config.kv.memory_bytes is None else config.kv.memory_bytes


def _with_pool(config: EngineConfig, model: LoadedModel, available: tuple[int, ...]) -> LoadedEngine:
    """`available`: what each rank has for its pool."""
    specs = model.layer_specs(config.kv.block_size, config.kv.dtype)
    kv = plan_pool(config, specs, available, model.spec.max_position)
    return LoadedEngine(model, kv, TorchExecutor(model, kv, config.scheduler, config.kv), model.adapters)


def _end_process(reason: str) -> None:
    log.critical("%s", reason)
    logging.shutdown()
    # The main thread may wait for the rank that is gone.
    os._exit(1)


def _end_with_first() -> None:
    """The end of the pipe is the end of the first rank's process, unless it has parted from this one before."""
    while said := os.read(sys.stdin.fileno(), 1024):  # not by `sys.stdin`, whose lock would be held at the end
        if said.endswith(_PART):
            return
    logging.shutdown()
    os._exit(1)
