"""A server under test and what is read of it from outside: processor time, memory, how long others wait."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_SETTLED_S, _LOOK_S = 0.02, 0.05
"""A server that uses less of each look has done its work: others ask it meanwhile."""
_MOST_SETTLING_S = 20.0
PATIENCE_S = 90.0


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far, by its clock of clock_getcpuclockid(3); 0: it is gone."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def children(pid: int) -> list[int]:
    """Of a process, those that run."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def status_kib(pid: int, key: str) -> int:
    """`VmRSS` or `VmHWM`."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


@dataclass
class Cost:
    """Of one request."""

    status: int
    """0: no answer within the patience."""
    body: int
    wire: int
    """Bytes of the body, and as they were sent."""
    answer: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    beside_s: float = 0.0
    """Of processes that the server has for it."""
    gap_s: float = 0.0
    others_s: float = 0.0
    """Longest wait for a ping, and of another client."""
    others_wall_s: float = 0.0
    refused: int = 0
    """Of other clients' requests."""
    peak_mib: float = 0.0
    stays_mib: float = 0.0
    said: str = ""
    """The beginning of an answer that is none."""


@dataclass(frozen=True)
class Engine:
    """A process that takes requests and ends them."""

    role: str
    port: int
    popen: subprocess.Popen[bytes]

    def requests(self) -> int:
        """That run or wait there."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:num_requests_"))


@dataclass
class Server:
    """A process and its watcher."""

    port: int
    task: str
    popen: subprocess.Popen[bytes]
    log: Path
    books: Path
    engines: list[Engine] = field(default_factory=list)
    """Real ones behind it, and itself where it is one."""
    watcher: subprocess.Popen[str] = field(init=False)
    idle: float = 0.0
    """Processor seconds a second while only the watcher asks."""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.popen.pid

    def ready(self) -> None:
        """Until it serves."""
        until = time.monotonic() + 120
        while True:
            assert self.popen.poll() is None, f"ended:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < until, f"not ready:\n{self.log.read_text()[-3000:]}"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=2):
                    break
            except OSError:
                time.sleep(0.05)
        argv = [sys.executable, str(HERE / "watcher.py"), str(self.port), str(self.pid), self.task]
        self.watcher = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.tell("reset")
        time.sleep(1.0)
        began, used = time.monotonic(), cpu_s(self.pid)
        time.sleep(1.0)
        self.idle = (cpu_s(self.pid) - used) / (time.monotonic() - began)
        told = self.tell("tell")
        assert not any(one[2] for one in told.values()), f"an honest client is refused: {told}"

    def tell(self, what: str) -> dict[str, Any]:
        """Of the watcher."""
        assert self.watcher.stdin is not None and self.watcher.stdout is not None
        self.watcher.stdin.write(f"{what}\n")
        self.watcher.stdin.flush()
        line = self.watcher.stdout.readline()
        assert line, f"watcher.py has ended with {self.watcher.wait()}; its error is above"
        told: dict[str, Any] = json.loads(line)
        return told

    def held(self) -> int:
        """Bytes that its books say requests hold."""
        return int(self.books.read_bytes().strip() or 0)

    def beside_s(self) -> float:
        """Processor time of its children, those that have ended among them."""
        stat = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[13]) + int(stat[14])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_s, children(self.pid)))

    def settle(self) -> None:
        """Until it computes no more than the watcher asks."""
        until = time.monotonic() + _MOST_SETTLING_S
        before = cpu_s(self.pid) + self.beside_s()
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            now = cpu_s(self.pid) + self.beside_s()
            if now - before < _SETTLED_S:
                return
            before = now

    def stop(self) -> None:
        """And the watcher."""
        for popen in (self.watcher, self.popen) if hasattr(self, "watcher") else (self.popen,):
            popen.kill()
            popen.wait()

    def measure(self, path: str, raw: bytes, *, packed: bool) -> Cost:
        """One request from an address of its own."""
        sent = gzip.compress(raw, 9 if len(raw) < 1 << 20 else 4) if packed else raw
        headers = {"Content-Type": "application/json", **({"Content-Encoding": "gzip"} if packed else {})}
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        rss, used, beside = status_kib(self.pid, "VmRSS"), cpu_s(self.pid), self.beside_s()
        self.tell("reset")
        cost = Cost(0, len(raw), len(sent))
        began = time.monotonic()
        cost.status, answer = call(self.port, path, sent, headers, "127.0.0.3")
        cost.answer = len(answer)
        cost.wall_s = time.monotonic() - began
        if cost.wall_s > 0.03 or not cost.status:
            self.settle()
        took = time.monotonic() - began
        told = self.tell("tell")
        cost.cpu_s = max(0.0, cpu_s(self.pid) - used - self.idle * took)
        cost.beside_s = self.beside_s() - beside
        cost.gap_s = told["gap"][1]
        cost.others_s = max(told["short"][1], told["long"][1])
        cost.others_wall_s = max(told["short"][0], told["long"][0])
        cost.refused = sum(one[2] for one in told.values())
        cost.peak_mib = (status_kib(self.pid, "VmHWM") - rss) / 1024
        cost.stays_mib = (status_kib(self.pid, "VmRSS") - rss) / 1024
        if cost.status != 200:
            cost.said = answer[:300].decode(errors="replace")
        return cost


def call(port: int, path: str, body: bytes, headers: dict[str, str], host: str) -> tuple[int, bytes]:
    """Status and answer; 0 and the error where there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S, source_address=(host, 0))
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()


def free_port() -> int:
    """Nobody listens there now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _spawn(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen([sys.executable, *argv], stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


@contextmanager
def serving(
    folder: Path,
    model: Path,
    *,
    kind: str,
    task: str,
    max_model_len: int,
    text: bool = False,
    limit_mib: int = 0,
    processors: int = 0,
    executor: str = "fake",
) -> Iterator[tuple[Server, int]]:
    """A router before an engine that computes nothing (`kind` router), a unified engine, or a router before prefill and
    decode (`pair`, over TCP); `executor`: of these. And the port of the engine that computes nothing, or 0. `text`: it
    takes texts. `limit_mib`: what the server believes its limit of memory to be; 0: its control group's. `processors`:
    how many it believes the machine has."""
    with ExitStack() as stack:
        port, behind, books = free_port(), 0, folder / "books"
        books.write_bytes(b"0")
        argv = [
            str(HERE / "launched.py"),
            str(books),
            str(processors),
            "serve",
            "--port",
            str(port),
            "--model",
            str(model),
        ]
        argv += ["--served-model-name", "test"]
        if limit_mib:
            argv += ["--memory-limit", f"{limit_mib}Mi"]
        if kind == "router":
            behind = free_port()
            upstream = [str(HERE / "upstream.py"), str(behind), "--task", task, "--max-model-len", str(max_model_len)]
            if text:
                from isthmus_runtime.openai.tokenizer import Tokenizer

                upstream += ["--tokenizer", Tokenizer.load(str(model)).digest]
            popen = _spawn(upstream, folder / "upstream.log")
            stack.callback(popen.wait)
            stack.callback(popen.kill)
            argv += ["--role", "router", "--worker", f"127.0.0.1:{behind}"]
        engine = ["--executor", executor, "--task", task, "--max-model-len", str(max_model_len)]
        engines = []
        if kind == "pair":
            moves = ["--transfer-mode", "direct", "--transfer-transport", "tcp", "--kv-memory", "64Mi"]
            argv += ["--role", "router"]
            for role in ("prefill", "decode"):
                at = free_port()
                asked = ["-m", "isthmus_runtime", "serve", "--role", role, "--port", str(at), "--model", str(model)]
                popen = _spawn([*asked, "--served-model-name", "test", *engine, *moves], folder / f"{role}.log")
                stack.callback(popen.wait)
                stack.callback(popen.kill)
                engines.append(Engine(role, at, popen))
                argv += [f"--{role}", f"127.0.0.1:{at}"]
        elif kind == "unified":
            argv += ["--role", "unified", *engine]
        log = folder / f"{kind}.log"
        server = Server(port, task, _spawn(argv, log), log, books, engines)
        if kind == "unified":
            server.engines.append(Engine(kind, port, server.popen))
        stack.callback(server.stop)
        server.ready()
        yield server, behind
