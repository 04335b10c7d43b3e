"""Fixtures that start engines and a real mooncake_master as processes, by argv, and stop them by pid."""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from processes import START_DEADLINE_S, free_port

HERE = Path(__file__).parent
WAIT_S = 30.0


class EngineProcess:
    """An `engine_process.py`: `call` waits for its answer, `event` for a handoff event."""

    def __init__(
        self, mode: str, *flags: str, blocks: int, block_bytes: int, master: str, segment: int, timeout: float
    ) -> None:
        argv = [sys.executable, str(HERE / "engine_process.py"), mode, "127.0.0.1", master]
        argv += [str(blocks), str(block_bytes), str(segment), str(timeout), *flags]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._events: list[dict[str, Any]] = []
        self._arrived = threading.Condition()
        self._ids = itertools.count()
        threading.Thread(target=self._read, daemon=True).start()

    @cached_property
    def hello(self) -> dict[str, Any]:
        """Its first line, waited for on first use, so that several start side by side."""
        return self._answers.get(timeout=START_DEADLINE_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("{"):
                continue  # the native library logs to stdout at times
            body = json.loads(line)
            if "event" in body:
                with self._arrived:
                    self._events.append(body)
                    self._arrived.notify_all()
            else:
                self._answers.put(body)

    def call(self, name: str, **arguments: Any) -> Any:
        assert "failed" not in self.hello, self.hello
        number = next(self._ids)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": name, "id": number, **arguments}) + "\n")
        self.process.stdin.flush()
        answer = self._answers.get(timeout=WAIT_S)
        assert answer["answer"] == number
        return answer["value"]

    def event(self, attempt: str, *kinds: str, timeout: float = WAIT_S) -> dict[str, Any]:
        """The first event of the attempt with one of the kinds."""
        found: list[dict[str, Any]] = []

        def arrived() -> bool:
            found[:] = [e for e in self._events if e["attempt"] == attempt and e["event"] in kinds]
            return bool(found)

        with self._arrived:
            assert self._arrived.wait_for(arrived, timeout), f"no {kinds} of {attempt} among {self._events}"
        return found[0]

    def kinds(self, attempt: str) -> list[str]:
        with self._arrived:
            return [e["event"] for e in self._events if e["attempt"] == attempt]

    def signal(self, number: int) -> float:
        now = time.monotonic()
        os.kill(self.process.pid, number)
        return now

    def kill(self) -> float:
        now = self.signal(signal.SIGKILL)
        self.process.wait(WAIT_S)
        return now

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Master:
    """A mooncake_master on loopback; `restart` keeps its port."""

    def __init__(self) -> None:
        self.port = free_port()
        self._metrics = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        binary = str(Path(sys.executable).with_name("mooncake_master"))
        argv = [binary, f"--rpc_port={self.port}", f"--metrics_port={self._metrics}"]
        argv += ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--logtostderr=1"]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 0.2).close()
                return process
            except OSError:
                assert process.poll() is None, f"mooncake_master ended with {process.returncode}"
                assert time.monotonic() < deadline, "mooncake_master does not listen"
                threading.Event().wait(0.02)

    def keys(self) -> list[str]:
        """Every key in the pool."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/get_all_keys", timeout=WAIT_S) as answer:
            return sorted(answer.read().decode().split())

    def kill(self) -> float:
        now = time.monotonic()
        self.process.kill()
        self.process.wait(WAIT_S)
        return now

    def restart(self) -> None:
        self.process = self._start()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)


@pytest.fixture
def master() -> Iterator[Master]:
    started = Master()
    yield started
    started.stop()


@pytest.fixture
def start_engine() -> Iterator[Callable[..., EngineProcess]]:
    started: list[EngineProcess] = []

    def start(
        mode: str,
        *flags: str,
        blocks: int = 64,
        block_bytes: int = 65536,
        master: str = "",
        segment: int = 64 << 20,
        timeout: float = 5.0,
    ) -> EngineProcess:
        engine = EngineProcess(
            mode, *flags, blocks=blocks, block_bytes=block_bytes, master=master, segment=segment, timeout=timeout
        )
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.stop()
