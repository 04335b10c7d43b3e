"""The service under test: master, prefills, decodes and a router, each in its own network namespace where possible.

Their output goes through pipes that this process empties into files, so that a log that cannot be written (a slow or
full disk) can be played: the pipe fills up, and the next message blocks its writer.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clock import Clocks
from descriptors import Descriptors, descriptors_of
from load import REQUEST_TIMEOUT_S
from names import SUFFIX, entering, resolv_conf
from network import HUB, Network
from processes import BIN, MODEL, free_port

PORT, METRICS_PORT = 8000, 9003
_PIPE_BYTES = 4096
_START_S = 60.0
_STOP_S = 20.0
_MEMORY = "300Mi"
"""Of a member: three times what one has at its start, and less than a crowd of large bodies."""


@dataclass
class Member:
    """One process and its log."""

    name: str
    argv: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    """Beside this process's own."""
    popen: subprocess.Popen[bytes] = field(init=False)
    writable: threading.Event = field(default_factory=threading.Event)
    """Whether its log takes bytes."""
    started: float = 0.0
    """When the process that is there was started. Times are time.time()."""
    ends: list[float] = field(default_factory=list)
    """When each earlier process was found gone."""
    disk: tuple[int, int] = (0, 0)
    """Bytes read from disk and written to it when it had become ready."""

    def start(self, prefix: Sequence[str] = ()) -> None:
        """`prefix`: of the command, within the member's network."""
        self.writable.set()
        if self.started:
            self.ends.append(time.time())
        self.started = time.time()
        self.popen = subprocess.Popen(
            [*prefix, *self.argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | self.environment,
        )
        assert self.popen.stdout is not None
        fcntl.fcntl(self.popen.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        threading.Thread(target=self._pump, args=(self.popen.stdout,), daemon=True).start()

    def _pump(self, source: object) -> None:
        assert hasattr(source, "fileno")
        with source, self.log.open("ab", buffering=0) as out:  # type: ignore[attr-defined]
            while data := os.read(source.fileno(), 65536):
                out.write(data)
                self.writable.wait()

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def send(self, number: int) -> None:
        if self.alive:
            self.popen.send_signal(number)

    def stop(self) -> int:
        """SIGTERM, and SIGKILL when it does not end; its status."""
        self.writable.set()
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            return self.popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait()


class Fleet:
    """Starts and stops members by name."""

    def __init__(
        self, folder: Path, mode: str, network: Network | None, more: Sequence[str] = (), clocks: bool = False
    ) -> None:
        """`more`: further arguments of every engine. `clocks`: whether they can jump."""
        self.model = folder / "model"
        self.mode = mode
        self._more = tuple(more)
        self.network = network
        self.prefills = [f"prefill{i}" for i in range(2)]
        self.decodes = [f"decode{i}" for i in range(2)]
        self.engines = [*self.prefills, *self.decodes]
        self.names = [*(["master"] if mode == "store" else []), *self.engines, "router"]
        self.port = {name: PORT if network else free_port() for name in self.names}
        self.metrics_port = METRICS_PORT if network else free_port()
        self.here = HUB if network else "127.0.0.1"
        self._resolver = entering(resolv_conf(folder, HUB)) if network else []
        self.clocks = Clocks(folder, self.names) if clocks else None
        self.member = {name: Member(name, self._argv(name), folder / f"{name}.log") for name in self.names}
        for name in self.names if self.clocks is not None else ():
            self.member[name].environment = self.clocks.environment(name)

    def host(self, name: str) -> str:
        return self.network.address[name] if self.network else "127.0.0.1"

    def address(self, name: str) -> str:
        return f"{self.host(name)}:{self.port[name]}"

    def url(self, name: str) -> str:
        return f"http://{self.address(name)}"

    @property
    def master_metrics(self) -> str:
        return f"http://{self.host('master')}:{self.metrics_port}"

    def _argv(self, name: str) -> list[str]:
        enter = [*self.network.enter(name), *self._resolver] if self.network else []
        host, port = self.host(name), str(self.port[name])
        if name == "master":
            argv = [str(BIN / "mooncake_master"), f"--rpc_address={host}", f"--rpc_port={port}"]
            return [*enter, *argv, f"--metrics_host={host}", f"--metrics_port={self.metrics_port}"]
        role = name.rstrip("0123456789")
        argv = [*enter, str(BIN / "isthmus-runtime"), "serve", "--role", role, "--host", host, "--port", port]
        argv += ["--model", str(self.model), "--served-model-name", "test", "--drain-timeout", "5s"]
        argv += ["--memory-limit", _MEMORY]
        if role == "router":
            argv += ["--prefill", self._by_name("prefill") or ",".join(map(self.address, self.prefills))]
            argv += ["--decode", self._by_name("decode") or ",".join(map(self.address, self.decodes))]
            return [*argv, "--request-timeout", f"{REQUEST_TIMEOUT_S:g}s"]
        argv += [*self._more, "--executor", "fake", "--kv-memory", "128Ki", "--transfer-mode", self.mode]
        # Short, so that what a failure leaves behind is swept within the time a run settles.
        argv += ["--transfer-timeout", "4s"]
        # One of each, so that recomputed answers and 502s both occur.
        argv += ["--transfer-on-failure", "fail" if name == "decode1" else "recompute"]
        if self.mode == "store":
            argv += [
                "--store-master",
                self._by_name("master") or self.address("master"),
                "--store-segment-size",
                "16Mi",
            ]
        return argv

    def _by_name(self, role: str) -> str:
        """Where a name stands for all members of the role; empty without a network of our own."""
        return f"{role}.{SUFFIX}:{PORT}" if self.network else ""

    def copy_model(self) -> None:
        """A model folder of this run: slowing it down disturbs nobody else. The engines here read no weights."""
        self.model.mkdir(exist_ok=True)
        for file in MODEL.iterdir():
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copy(file, self.model)

    def descriptors(self, name: str) -> Descriptors:
        """What a member has open."""
        names = {} if self.network is None else {address: n for n, address in self.network.address.items()}
        return descriptors_of(self.member[name].popen.pid, names)

    def ended(self) -> dict[str, int]:
        """Members that run no more, with their statuses."""
        begun = {name: member.popen for name, member in self.member.items() if hasattr(member, "popen")}
        return {name: popen.returncode for name, popen in begun.items() if popen.poll() is not None}

    def close(self) -> dict[str, int]:
        """Stop everything: SIGTERM to all, and the statuses."""
        return {name: self.member[name].stop() for name in reversed(self.names) if hasattr(self.member[name], "popen")}
