"""An engine in a process of its own: started, watched and ended by the API process (docs/adr/0041).

The API process is the one that others know: it has the ports, gets the signals, and its exit status is the pod's. The
two are joined by a socket pair that nobody else can reach. When one process is gone the other finds its socket closed:
the engine process ends at once, the API process ends its requests first.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import TypeAdapter

from ..collecting import spare_collector
from ..config import EngineConfig
from ..errors import ConfigError, EngineFailed, IsthmusError

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "isthmus_runtime", "engine")
_CONFIG = TypeAdapter(EngineConfig)
_NVIDIA = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Present where a process may use a GPU; the second under WSL. Loading torch to ask would cost the API process seconds
and a context."""
_BUFFER_BYTES = 4 << 20
"""Of the socket, each way: a step of 4,096 rows."""
_SAID_S = 10.0
"""How long the last words to the API process may take."""


def runs_apart(config: EngineConfig) -> bool:
    """Whether `--api-process` makes two processes of this engine: `auto` does where it will compute on a GPU."""
    if config.server.api_process != "auto":
        return config.server.api_process == "on"
    if config.executor == "fake" or config.model.device == "cpu":
        return False
    return config.model.device == "cuda" or any(map(Path.exists, _NVIDIA))


class EngineProcess:
    """The engine process, as its parent holds it."""

    def __init__(self, config: EngineConfig) -> None:
        """Start it: it loads the model, and tells through `socket` when it serves."""
        self.socket, theirs = socket.socketpair()
        for end in (self.socket, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        with theirs:
            fd = theirs.fileno()
            # A session of its own: Ctrl-C is for the API process, which lets requests finish.
            self._process = subprocess.Popen(
                [*COMMAND, str(fd)], stdin=subprocess.PIPE, pass_fds=(fd,), start_new_session=True
            )
        self._ends_by = math.inf
        assert self._process.stdin is not None
        with self._process.stdin as orders:
            orders.write(_CONFIG.dump_json(config))

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def expect_end(self, within_s: float) -> None:
        """It is told to stop: `end` waits no longer than `within_s` from now."""
        self._ends_by = time.monotonic() + within_s

    def end(self, timeout_s: float) -> int:
        """Wait until it has ended, by force after `timeout_s`; its exit status, negative for a signal."""
        self.socket.close()
        timeout_s = max(0.0, min(timeout_s, self._ends_by - time.monotonic()))
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.error("the engine process %d has not ended within %g s and is killed", self.pid, timeout_s)
            self._process.kill()
            return self._process.wait()


def check_status(status: int) -> None:
    """Raise EngineFailed where an engine process did not end as it should; ConfigError where its log says which of its
    settings is wrong."""
    if status == 2:
        raise ConfigError("the engine process could not start; its last lines say why")
    if status < 0:
        name = signal.Signals(-status).name
        hint = " (out of memory, if nobody sent it)" if name == "SIGKILL" else ""
        raise EngineFailed(f"the engine process was ended by {name}{hint}")
    if status:
        raise EngineFailed(f"the engine process ended with status {status}; its last lines say why")


def engine_main(argv: Sequence[str]) -> NoReturn:
    """`isthmus-runtime engine FD`: started by `EngineProcess`, not by people."""
    config = _CONFIG.validate_json(sys.stdin.buffer.read())
    logging.basicConfig(
        level=config.server.log_level.upper(),
        format="%(asctime)s %(levelname)s engine process: %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        status = _run(config, socket.socket(fileno=int(argv[0])))
    except ConfigError as error:
        log.critical("%s", "; ".join(error.problems))
        status = 2
    except IsthmusError as error:
        log.critical("%s", error)
        status = 1
    _leave(status)


def _run(config: EngineConfig, sock: socket.socket) -> int:
    from ..engine.host import EngineHost
    from .engine_core import load_executor, start_engine

    host = EngineHost(sock, lost=_lost, clock=time.monotonic, traced=bool(config.server.tracing.endpoint))
    host.start()
    events = host.events if config.kv.prefix_caching else None
    core = start_engine(config, load_executor(config), host.sink, events=events, started=host.started, left=host.left)
    if config.transfer.mode != "none":
        from ..transfer.sockets import probe_accepted

        probe_accepted()
    spare_collector()
    host.serve(core.engine, core.facts)
    host.stop.wait()
    core.stop()
    host.finish(_SAID_S)
    core.close()
    if core.engine.loop.failure:
        raise EngineFailed(core.engine.loop.failure)
    return 0


def _lost(reason: str) -> None:
    """Nobody is left to compute for. As a crash would: whoever shares memory or sockets with this process sees its end,
    and the main thread may be in a call that does not return."""
    log.critical("%s; so this process ends", reason)
    _leave(1)


def _leave(status: int) -> NoReturn:
    # Everything of ours is closed. Finalising the interpreter would end the process by a signal where a call into a
    # transport still runs, and run Mooncake's exit handlers, which call a master that is gone for most of a minute.
    logging.shutdown()
    os._exit(status)
