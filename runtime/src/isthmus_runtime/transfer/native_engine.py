"""Starts Mooncake's TransferEngine: chooses the transport, registers memory, and measures what really moves bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import apply_native_environment
from ..errors import ConfigError
from ..interfaces.transport import KvRegion
from .backend import Effective
from .bounded import INSTALL_HINT, built_for_cpus
from .handshakes import started
from .peer_memory import PeerMemory, reaches_a_peer
from .slots import RecordSlots
from .sockets import listening_ports, probe_accepted
from .transport import DONE, FAILED, FLOOR_GBPS, check_memory, choose_transport, transport_environment

POLL_S = 0.0005
"""Pace of looking at a transfer that moves: Mooncake offers no completion event, and its own waits spin on a core."""
PROBE_BYTES = 8 << 20
PROBE_PARTS = 8
PROBE_S = 4.0


@dataclass(frozen=True, slots=True)
class NativeEngine:
    """A TransferEngine that runs, with this process's memory registered."""

    engine: Any
    """A `mooncake.engine.TransferEngine`."""
    session: str
    """Its peer id, `host:port`."""
    ports: frozenset[int]
    """Where this process takes what peers write."""
    effective: Effective
    memory: PeerMemory | None = None
    """What moves blocks over NVLink; the engine then has nothing but the records."""

    def release(self, pool: int, records: int) -> None:
        """Unregister the memory that begins there. Only when no transfer reads or writes it any more."""
        if self.memory is None:
            self.engine.unregister_memory(pool)
        else:
            self.memory.close()
        self.engine.unregister_memory(records)


def start_engine(
    host: str,
    region: KvRegion,
    slots: RecordSlots,
    *,
    transport: str,
    fallback: str,
    timeout_s: float,
    measured: Effective | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> NativeEngine:
    """TransferEngine at `host`, with P2PHANDSHAKE. `transport`, `fallback`: as asked for; `timeout_s`: of a transfer.

    `measured`: what one before it moved; None: the memory is unused yet, and a probe writes there.

    Raises:
        ConfigError: no Mooncake, none that reads this memory, no such transport, a refusal, or too slow a probe.
    """
    rdma = sorted(p.name for p in Path("/sys/class/infiniband").glob("*"))
    transport, protocol = choose_transport(
        transport,
        fallback,
        device=region.device,
        rdma_devices=rdma,
        nvlink=transport == "auto" and reaches_a_peer(region.device),
    )
    if transport != "nvlink":
        check_memory("direct", region.device, built_for_cpus=built_for_cpus())
    # Some of it is read as soon as the library is loaded.
    apply_native_environment(transport_environment(transport, host, timeout_s))
    try:
        import mooncake.engine as mooncake
    except ImportError as error:
        raise ConfigError(f"--transfer-mode direct: Mooncake cannot be loaded ({error}); {INSTALL_HINT}") from error
    others = listening_ports()
    engine = mooncake.TransferEngine()
    code = engine.initialize(host, "P2PHANDSHAKE", protocol, ",".join(rdma) if transport == "rdma" else "")
    if code != 0:
        raise ConfigError(
            f"--transfer-transport {transport}: TransferEngine did not start on {host!r} (code {code}); "
            "--transfer-host must be an address of this machine"
        )
    ports = listening_ports() - others
    probe_accepted()
    _register(engine, transport, {"records": (slots.base, slots.nbytes)})
    session = f"{host}:{engine.get_rpc_port()}"
    if transport == "nvlink":
        return NativeEngine(engine, session, ports, Effective(transport, 0.0), PeerMemory(region, clock))
    _register(engine, transport, {"KV pool": (region.base, region.num_blocks * region.block_stride)})
    if measured is not None:
        return NativeEngine(engine, session, ports, measured)
    gbps = _probe(engine, session, region, slots, clock)
    if gbps < FLOOR_GBPS.get(transport, 0.0):
        raise ConfigError(
            f"--transfer-transport {transport}: the probe moved {gbps} GB/s, not {FLOOR_GBPS[transport]} "
            "or more; something slower moved the bytes: fix the driver, or ask for tcp"
        )
    return NativeEngine(engine, session, ports, Effective(transport, gbps))


def _register(engine: Any, transport: str, regions: Mapping[str, tuple[int, int]]) -> None:
    for name, (base, nbytes) in regions.items():
        code = engine.register_memory(base, nbytes)
        if code != 0:
            raise ConfigError(f"--transfer-transport {transport}: registering {name} ({nbytes} bytes) gave {code}")


def _probe(engine: Any, session: str, region: KvRegion, slots: RecordSlots, clock: Callable[[], float]) -> float:
    """GB/s of a write within the still unused memory of this process, through its own session."""
    on_host, size = region.device == "cpu", region.num_blocks * region.block_stride
    nbytes = min(PROBE_BYTES, slots.nbytes if on_host else size // 2, size)
    target = slots.base if on_host else region.base + nbytes
    part = max(1, nbytes // PROBE_PARTS)
    pause = threading.Event()
    best = 0.0
    for _ in range(2):  # the first one opens the connections
        began = clock()
        flying = [
            engine.transfer_submit_write(session, region.base + at, target + at, part)
            for at in range(0, nbytes - part + 1, part)
        ]
        count = len(flying)
        while flying:
            if not started(flying[0]):
                raise ConfigError(f"a probe of {nbytes} bytes to this process's own {session} failed")
            status = engine.transfer_check_status(flying[0])
            if status == DONE:
                del flying[0]
            elif status == FAILED or clock() - began > PROBE_S:
                flying[0] = 0
            else:
                pause.wait(POLL_S)
        best = max(best, count * part / (clock() - began) / 1e9)
    return round(best, 2)
