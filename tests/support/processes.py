"""Real processes for end-to-end tests: start by argv, wait with a deadline, stop by pid, show their logs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

BIN = Path(sys.executable).parent
MODEL = Path(os.environ.get("ISTHMUS_CACHE", "~/.cache/isthmus")).expanduser() / "models" / "smollm2-135m-instruct"
START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 15.0
PATIENCE_S = 60.0
_taken: list[socket.socket] = []
"""Bound as long as this process lives."""


def free_port() -> int:
    """A port of loopback that nobody listens on, and that is this process's as long as it lives: the kernel gives it to
    nobody who asks for any. A server that sets SO_REUSEADDR, as servers do, may listen on it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _taken.append(holder)
    return int(holder.getsockname()[1])


@dataclass
class Process:
    """One child with its log file."""

    name: str
    argv: list[str]
    log: Path
    popen: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> Process:
        with self.log.open("ab") as out:
            self.popen = subprocess.Popen(self.argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        return self

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.popen.send_signal(number)

    def interrupt(self) -> None:
        """Begin to stop, as by a person's Ctrl-C: after a SIGTERM, servers take requests for seconds more."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.send_signal(signal.SIGINT)

    def stop(self) -> int:
        """SIGINT, then SIGKILL; the exit status."""
        self.interrupt()
        if self.popen.poll() is None:
            try:
                self.popen.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
        return self.popen.wait(STOP_DEADLINE_S)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_http(self, url: str, deadline_s: float = START_DEADLINE_S) -> None:
        """Until `url` answers 200; AssertionError with the log when the process dies or the deadline passes."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            assert self.popen.poll() is None, f"{self.name} exited {self.popen.returncode}:\n{self.tail()}"
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise AssertionError(f"{self.name}: {url} not ready in {deadline_s} s:\n{self.tail()}")


def running(pid: int) -> bool:
    """Whether a process runs: it is there and has not ended unreaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds: Callable[[], bool], what: str) -> None:
    """Ask again until it holds; fails with `what` after PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def get_json(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
        body = json.load(response)
    assert isinstance(body, dict)
    return body


def metric(url: str, name: str, **labels: str) -> float:
    """Sum of the samples of `name` whose labels include `labels`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as response:
        text = response.read().decode()
    total = 0.0
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
            total += float(value)
    return total


@dataclass
class Stack:
    """A disaggregated service: master (store mode), prefill and decode engines, router."""

    tmp: Path
    mode: str
    executor: str = "fake"
    model: Path = MODEL
    engine_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    prefills: int = 1
    decodes: int = 1
    host: str = "127.0.0.1"
    """Where the processes reach each other; of IPv6 in brackets."""
    all: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def url(self, name: str) -> str:
        return f"http://{self.host}:{self.ports[name]}"

    def spawn(self, name: str) -> Process:
        """Start (or start again, on the same port) one process."""
        process = Process(name, self._argv(name), self.tmp / f"{name}.log").start()
        self.all[name] = process
        return process

    def ready(self, *names: str) -> None:
        for name in names:
            self.all[name].wait_http(self.url(name) + "/ready")

    def up(self, stack: ExitStack) -> Stack:
        engines = [f"prefill{i}" for i in range(self.prefills)] + [f"decode{i}" for i in range(self.decodes)]
        names = (["master"] if self.mode == "store" else []) + engines + ["router"]
        for name in names:
            self.ports[name] = free_port()
        self.ports["metrics"] = free_port()
        for name in names:
            self.spawn(name)
            stack.callback(lambda n=name: self.all[n].stop())
            if name == "master":
                self._wait_master()
        stack.callback(lambda: [self.all[n].interrupt() for n in names if n != "master"])
        self.ready(*engines, "router")
        self._wait_paired()
        return self

    def _wait_paired(self) -> None:
        """The router is ready with decode alone; tests of transfers need it to know the prefill engines too."""
        end = time.monotonic() + START_DEADLINE_S
        while any(e["state"] != "ready" for e in get_json(self.url("router") + "/info")["engines"]):  # type: ignore[attr-defined]
            assert time.monotonic() < end, f"the router does not take every engine:\n{self.all['router'].tail()}"
            time.sleep(0.05)

    def _wait_master(self) -> None:
        end = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection((self.host.strip("[]"), self.ports["master"])):
                return
            time.sleep(0.05)
        raise AssertionError(f"mooncake_master does not listen:\n{self.all['master'].tail()}")

    def _argv(self, name: str) -> list[str]:
        if name == "master":
            return [
                str(BIN / "mooncake_master"),
                f"--rpc_address={self.host.strip('[]')}",
                f"--rpc_port={self.ports['master']}",
                f"--metrics_host={self.host.strip('[]')}",
                f"--metrics_port={self.ports['metrics']}",
            ]
        role = name.rstrip("0123456789")
        argv = [str(BIN / "isthmus-runtime"), "serve", "--role", role, "--port", str(self.ports[name])]
        argv += ["--model", str(self.model), "--served-model-name", "test"]
        if role == "router":
            prefill = ",".join(f"{self.host}:{self.ports[f'prefill{i}']}" for i in range(self.prefills))
            decode = ",".join(f"{self.host}:{self.ports[f'decode{i}']}" for i in range(self.decodes))
            return [*argv, "--prefill", prefill, "--decode", decode, *self.router_args]
        argv += ["--executor", self.executor, "--transfer-mode", self.mode, *self.engine_args]
        if self.mode == "store":
            argv += ["--store-master", f"{self.host}:{self.ports['master']}", "--store-segment-size", "256Mi"]
        return argv


@contextmanager
def stack(tmp: Path, mode: str, **kwargs: object) -> Iterator[Stack]:
    """A running Stack; every process is stopped at the end, whatever happened."""
    with ExitStack() as exits:
        service = Stack(tmp, mode, **kwargs)  # type: ignore[arg-type]
        yield service.up(exits)
