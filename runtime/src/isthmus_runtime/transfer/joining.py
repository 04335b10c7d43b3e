"""Joins a Mooncake storage pool: sets the client up, registers memory, and makes sure that the pool works."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .bounded import INSTALL_HINT, TookTooLong, connect_problem, run_bounded
from .pool_codes import NO_SPACE, explain
from .pool_probe import PoolFull, PoolProbe
from .sockets import probe_accepted

log = logging.getLogger(__name__)

LOCAL_BUFFER_BYTES = 16 << 20
"""The client's own buffer only serves calls that copy; all of ours use registered memory."""
CONNECT_S = 2.0
PROBE_S = 10.0
"""After joining, how soon the pool must give back what is put into it."""
REACH_S = 2.0
"""How long measuring the pool as a whole may take."""

# setup() keeps the interpreter lock, for more than a minute when the master does not answer: no thread of this process
# could give it up. A child tries it first; one that hangs is killed.
_SETUP_REFUSED = 3
_TRY_SETUP = f"""
import os, sys
from mooncake.store import MooncakeDistributedStore
code = MooncakeDistributedStore().setup(
    sys.argv[1], "P2PHANDSHAKE", 0, {LOCAL_BUFFER_BYTES}, "tcp", "", sys.argv[2])
os._exit({_SETUP_REFUSED} if code else 0)
"""


@dataclass(frozen=True, slots=True)
class StorePool:
    """A pool that was joined."""

    native: Any
    """The module `mooncake.store`."""
    store: Any
    """A MooncakeDistributedStore."""
    segment: str
    """Name of this process's own segment."""
    gbps: float
    """As probed; 0 when the pool had no space for that."""
    probe_over: threading.Event
    """Set when no call of the probe runs any more: one that was given up does, and nothing may be closed under it."""


def leave_behind(store: Any) -> None:
    """Never run the destructor: without a master it keeps the interpreter lock for a quarter of a minute."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))


def join_pool(
    host: str,
    master: str,
    segment_bytes: int,
    regions: Mapping[str, tuple[int, int]],
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> StorePool:
    """The pool of `master`, to which this process adds a segment. `regions`: (address, bytes) to register, by name.

    Raises:
        ConfigError: no master, no Mooncake, a refusal, or a pool that does not return what is put into it.
    """
    deadline = clock() + timeout_s
    _try_setup(host, master, timeout_s)
    import mooncake.store as native

    store = native.MooncakeDistributedStore()
    code = store.setup(host, "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
    if code != 0:
        leave_behind(store)
        raise ConfigError(
            f"--store-master {master}: setup from {host!r} with --store-segment-size {segment_bytes} gave "
            f"{explain(code)}; the smallest segment is 16Mi"
        )
    probe_accepted()
    for name, (base, nbytes) in regions.items():
        code = store.register_buffer(base, nbytes)
        if code != 0:
            raise ConfigError(f"--transfer-mode store: registering {name} ({nbytes} bytes) gave {explain(code)}")
    segment = store.get_hostname()
    gbps, over = _probed(native, store, segment, master, min(PROBE_S, deadline - clock()), clock)
    return StorePool(native, store, segment, gbps, over)


def _try_setup(host: str, master: str, timeout_s: float) -> None:
    fix = "start mooncake_master there, or correct --store-master"
    if problem := connect_problem(master, min(timeout_s, CONNECT_S)):
        raise ConfigError(f"--store-master {master}: no connection ({problem}); {fix}")
    argv = [sys.executable, "-c", _TRY_SETUP, host, master]
    try:
        subprocess.run(argv, timeout=timeout_s, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"--store-master {master}: no answer within {timeout_s:g} s; {fix}") from error
    except subprocess.CalledProcessError as error:
        if error.returncode == _SETUP_REFUSED:
            raise ConfigError(f"--store-master {master}: it refused {host!r} as a client") from error
        raise ConfigError(
            f"--transfer-mode store: Mooncake cannot be loaded (exit status {error.returncode}); {INSTALL_HINT}"
        ) from error


def _probed(
    native: Any, store: Any, segment: str, master: str, timeout_s: float, clock: Callable[[], float]
) -> tuple[float, threading.Event]:
    """GB/s, or 0 for a pool without space; and the event that is set when no call runs any more.

    This process's own segment must work: its puts depend on nothing else. What it reads comes from the segments of
    others: their speed is worth more, but one that is sick is no reason not to start.
    """
    probe = PoolProbe(store, clock, threading.Event().wait)
    own, anywhere = native.ReplicateConfig(), native.ReplicateConfig()
    own.replica_num = anywhere.replica_num = 1
    own.preferred_segment = segment
    deadline = clock() + timeout_s
    over = threading.Event()
    over.set()
    try:
        gbps, problem = run_bounded(lambda: probe.until_it_works(own, deadline), timeout_s + REACH_S, "transfer-probe")
    except TookTooLong as error:
        gbps, problem = 0.0, str(error)
    except PoolFull:
        log.warning("the pool at %s has no space for a probe: its speed is not known", master)
        probe.close()
        return 0.0, over
    if problem:
        leave_behind(store)
        raise ConfigError(
            f"--store-master {master}: the pool did not return what was put into it within {timeout_s:.1f} s: "
            f"{problem}; see the log of mooncake_master"
        )
    try:
        reached, problem = run_bounded(lambda: probe.once(anywhere), REACH_S, "transfer-probe")
    except TookTooLong as error:
        log.warning("the pool's speed is that of this process's own segment: %s", error)
        return float(gbps), error.ended
    except PoolFull:
        reached, problem = 0.0, explain(NO_SPACE)
    probe.close()
    if problem:
        log.warning("the pool's speed is that of this process's own segment: %s", problem)
    return float(gbps if problem else reached), over
