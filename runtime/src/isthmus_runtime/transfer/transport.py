"""Which transport moves the bytes, how Mooncake is told, and how blocks become runs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from ..errors import ConfigError
from ..interfaces.transport import KvRegion, Piece

FLOOR_GBPS = {"rdma": 2.0}
"""A probe below this means that something slower moved the bytes."""
MOVING, DONE, FAILED = 0, 1, -1
"""What has become of a write: as Mooncake's `transfer_check_status` answers, which has other values for the first."""


MAX_RUN_BYTES = {"tcp": 2 << 20, "rdma": 16 << 20, "nvlink": 16 << 20}
"""NVLink needs large runs to reach its speed; TCP several connections at once."""


class Run(NamedTuple):
    """Adjacent bytes on both sides."""

    source: int
    target: int
    nbytes: int


_PLACE = attrgetter("block_id", "offset")


def merge_runs(pieces: Iterable[Piece], region: KvRegion, max_bytes: int) -> list[Run]:
    """Pieces as runs that are adjacent both here and at the peer. Order is free, so they are sorted.

    No run outgrows `max_bytes` by merging: a run that has started cannot be cancelled, and one connection carries it.
    """
    runs: list[Run] = []
    base, stride = region.base, region.block_stride
    for block, _, nbytes, offset, target in sorted(pieces, key=_PLACE):
        source = base + block * stride + offset
        if runs:
            before, there, length = runs[-1]
            if before + length == source and there + length == target and length + nbytes <= max_bytes:
                runs[-1] = Run(before, there, length + nbytes)
                continue
        runs.append(Run(source, target, nbytes))
    return runs


def choose_transport(
    asked: str, fallback: str, *, device: str, rdma_devices: Sequence[str], nvlink: bool
) -> tuple[str, str]:
    """(transport, Mooncake protocol) for a request of auto | rdma | nvlink | tcp. Over NVLink only records go by it.

    `nvlink`: this process sees another GPU that NVLink joins to its own. Its peer may be elsewhere all the same: what
    reaches other hosts goes first, be it TCP where that is allowed.

    Raises:
        ConfigError: an explicit transport is not available here, or auto would settle for less than the device needs.
    """
    gpu = device.startswith("cuda")
    if asked == "rdma":
        if not rdma_devices:
            raise ConfigError("--transfer-transport rdma: no RDMA device in /sys/class/infiniband; use tcp or auto")
        return "rdma", "rdma"
    if asked == "nvlink":
        if not gpu:
            raise ConfigError(f"--transfer-transport nvlink: the KV pool is on {device!r}, not on a GPU; use tcp")
        return "nvlink", "tcp"
    if asked == "tcp":
        return "tcp", "tcp"
    if asked != "auto":
        raise ConfigError(f"--transfer-transport {asked!r} is unknown; allowed: auto, rdma, nvlink, tcp")
    if rdma_devices:
        return "rdma", "rdma"
    if gpu and nvlink and fallback != "allow-tcp":
        return "nvlink", "tcp"
    if gpu and fallback != "allow-tcp":
        raise ConfigError("--transfer-transport auto found neither NVLink nor RDMA; --transfer-fallback allow-tcp")
    return "tcp", "tcp"


def check_memory(mode: str, device: str, *, built_for_cpus: bool) -> None:
    """Refuse what would end in a crash or in wrong bytes: a pool on a GPU that nothing here can move safely.

    Raises:
        ConfigError: the store has no host staging for a GPU's pool, or Mooncake's build reads host memory alone.
    """
    if device == "cpu":
        return
    if mode == "store":
        raise ConfigError(
            f"--transfer-mode store: the KV pool is on {device!r}, and blocks of a GPU cannot be checked on their way "
            "through the store yet; use --transfer-mode direct, or --device cpu"
        )
    if built_for_cpus:
        raise ConfigError(
            f"--transfer-mode {mode}: the KV pool is on {device!r}, and mooncake-transfer-engine-non-cuda would read "
            "its addresses as host memory; install mooncake-transfer-engine-cuda13 in its place, or use "
            "--transfer-transport nvlink between GPUs of one host"
        )


def transport_environment(transport: str, host: str, timeout_s: float) -> dict[str, str]:
    """Mooncake's settings, which it reads from the environment when an engine starts at `host`."""
    seconds = str(max(1, round(timeout_s)))
    env = {
        # Defaults of 1024 make a large prompt fail after partial writes, and can leave the peer unusable.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        # 1 would report a write as complete while its bytes are still in socket buffers.
        "MC_TCP_PROTO": "2",
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_TCP_SLICE_SIZE": str(256 << 10),
        # How long a dead or silent peer goes unnoticed.
        "MC_TCP_ADMISSION_TIMEOUT_MS": "300",
        "MC_HANDSHAKE_CONNECT_TIMEOUT": "1",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_LOG_LEVEL": "ERROR",
    }
    if ":" in host:
        env["MC_USE_IPV6"] = "1"  # else it listens on addresses of IPv4 alone
    if transport != "rdma":
        # Without it an engine on a host with RDMA cards takes those, whatever protocol it is given.
        env["MC_FORCE_TCP"] = "1"
    return env
