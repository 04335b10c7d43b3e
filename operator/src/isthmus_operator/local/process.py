"""One container: its process, its probes, its restarts and its end. The supervisor owns it; nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ..errors import LaunchError
from .pods import Container, Pod, Probe
from .probes import attempt

_CHILD = str(Path(__file__).with_name("child.py"))
_TAIL = 15
_FAST_S = 0.25
"""Probes before a container is ready are cheap here, and a person waits for them: at most this far apart."""

_HINTS = (
    ("libibverbs", "Mooncake needs the system library libibverbs1: run `make native`"),
    ("Address already in use", "another program uses a port; the lines above name it"),
    ("No space left on device", "the disk, or /dev/shm, is full"),
    ("MemoryError", "memory is short: lower spec.engine.kvCache.memory or spec.store.segmentSize"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Restarts. Times in seconds."""

    first_backoff_s: float = 1.0
    longest_backoff_s: float = 30.0
    healthy_after_s: float = 60.0
    """A run this long starts the back-off anew."""
    give_up_after: int = 3
    """Failed runs in a row, before the service was ever ready, that count as "cannot start"."""

    def backoff_s(self, failures: int) -> float:
        """Wait before the next start, after this many failures in a row."""
        return min(self.longest_backoff_s, self.first_backoff_s * 2.0 ** min(failures - 1, 32))


class ProcessState(StrEnum):
    WAITING = "Waiting"
    RUNNING = "Running"
    EXITED = "Exited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a container's process gets from the supervisor. started/ended tell the guard about process groups."""

    environment: dict[str, str]
    find_program: Callable[[str], str | None]
    log: Callable[[str, str], None]
    say: Callable[[str], None]
    changed: Callable[[], None]
    started: Callable[[int], None]
    ended: Callable[[int], None]
    was_ready: Callable[[], bool]
    policy: Policy
    log_dir: Path


class ContainerProcess:
    """Runs one container until told to stop."""

    def __init__(self, pod: Pod, container: Container, around: Surroundings, *, init: bool = False) -> None:
        self.pod = pod
        self.container = container
        alone = len(pod.containers) == 1 and not init
        self.label = pod.name if alone else f"{pod.name}/{container.name}"
        self.log_path = around.log_dir / (self.label.replace("/", "-") + ".log")
        self.state = ProcessState.WAITING
        self.pid: int | None = None
        self.restarts = 0
        self.last_exit: int | None = None
        self.ready = False
        self.waiting_for = "start"
        self._around = around
        self._init = init
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._tail: deque[str] = deque(maxlen=_TAIL)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after the pod's grace. `run` returns when the process is gone."""
        self._stop.set()

    def kill(self) -> None:
        """SIGKILL at once."""
        self._stop.set()
        self._kill.set()

    async def run(self) -> None:
        """Starts the process, again after each exit as the restart policy says. LaunchError when it cannot start."""
        policy, failures = self._around.policy, 0
        while not self._stop.is_set():
            started = asyncio.get_running_loop().time()
            code = await self._run_once()
            if self._stop.is_set() or (self._init and code == 0):
                return
            if asyncio.get_running_loop().time() - started >= policy.healthy_after_s:
                failures = 0
            failures += 1
            # Exit code 2 is how programs refuse their arguments: trying again cannot help.
            hopeless = code == 2 or failures >= policy.give_up_after or not self.pod.restart
            if hopeless and not self._around.was_ready():
                raise LaunchError(self._cause(code, failures))
            if not self.pod.restart:
                return
            wait_s = policy.backoff_s(failures)
            self.restarts += 1
            self._set(ProcessState.WAITING, f"restart in {wait_s:g} s")
            self._around.say(f"{self.label}: {_ended(code)}; restart {self.restarts} in {wait_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait_s)

    async def _run_once(self) -> int:
        # A pipe of our own: asyncio's would make wait() wait for everybody who inherited it, not for this process.
        read_end, write_end = os.pipe()
        try:
            process = await self._spawn(write_end)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self.pid, self.waiting_for = process.pid, "first answer"
        self._around.started(process.pid)
        self._set(ProcessState.RUNNING)
        pump = asyncio.create_task(self._pump(read_end))
        ended = asyncio.create_task(process.wait())
        # Never completes by itself for a healthy container; its result says why the container must be restarted.
        watch = asyncio.create_task(self._watch())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({ended, watch, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                if watch.done() and not stop.done():
                    self._around.say(f"{self.label}: {watch.result()}; it is restarted")
                await self._terminate(process, ended)
            code = await ended
        finally:
            for task in (watch, stop):
                task.cancel()
            await asyncio.gather(watch, stop, return_exceptions=True)
            # As in a container, what the first process started does not outlive it. This also closes the pipe.
            _signal_group(process.pid, signal.SIGKILL)
            await asyncio.gather(ended, pump)
            self._around.ended(process.pid)
            self.pid, self.ready, self.last_exit = None, False, process.returncode
            self._set(ProcessState.EXITED)
        return code

    async def _spawn(self, output: int) -> asyncio.subprocess.Process:
        program = self._around.find_program(self.container.argv[0])
        if program is None:
            raise LaunchError(
                f"{self.label}: the program {self.container.argv[0]} is neither beside {sys.executable} nor on PATH;"
                " install the runtime into the same environment (make venv)"
            )
        arguments = [sys.executable, "-I", "-S", _CHILD, str(os.getpid()), program, *self.container.argv[1:]]
        return await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env={**self._around.environment, "PYTHONUNBUFFERED": "1", **self.container.env},
            # Its own group: a Ctrl-C in the terminal reaches only us, and the group can be ended as one.
            start_new_session=True,
        )

    async def _terminate(self, process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        kill = asyncio.create_task(self._kill.wait())
        try:
            await asyncio.wait({ended, kill}, timeout=self.pod.grace_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            kill.cancel()
            await asyncio.gather(kill, return_exceptions=True)
        if not ended.done():
            if not self._kill.is_set():
                self._around.say(
                    f"{self.label}: did not exit within its grace period of {self.pod.grace_s:g} s; killed"
                )
            _signal_group(process.pid, signal.SIGKILL)

    async def _pump(self, read_end: int) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(read_end, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        rest = b""
        with contextlib.closing(transport), self.log_path.open("ab") as file:
            while chunk := await reader.read(65536):
                file.write(chunk)
                file.flush()
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._line(line)
        if rest:
            self._line(rest)

    def _line(self, raw: bytes) -> None:
        line = raw.decode("utf-8", "replace").rstrip("\r")
        self._tail.append(line)
        self._around.log(self.label, line)

    async def _watch(self) -> str:
        """Runs the probes. Returns why the container must be restarted; waits for ever when it must not."""
        if self.container.startup is not None and (failure := await self._starting(self.container.startup)):
            return failure
        if self._init:
            await asyncio.Event().wait()
        readiness = asyncio.create_task(self._readiness(self.container.readiness))
        try:
            if self.container.liveness is None:
                await readiness
            else:
                return await self._liveness(self.container.liveness)
        finally:
            readiness.cancel()
            await asyncio.gather(readiness, return_exceptions=True)
        return "its readiness probe ended"

    async def _starting(self, probe: Probe) -> str:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(probe.initial_delay_s)
        deadline = loop.time() + probe.period_s * probe.failure_threshold
        while failure := await attempt(probe, self.pod.address):
            self.waiting_for = failure
            if loop.time() >= deadline:
                return f"did not start in {probe.period_s * probe.failure_threshold:g} s ({failure})"
            await asyncio.sleep(min(probe.period_s, _FAST_S))
        return ""

    async def _readiness(self, probe: Probe | None) -> None:
        failures = 0
        while probe is not None:
            failure = await attempt(probe, self.pod.address)
            failures = failures + 1 if failure else 0
            self.waiting_for = failure
            if not failure or failures >= probe.failure_threshold:
                self._set_ready(not failure)
            await asyncio.sleep(probe.period_s if self.ready else min(probe.period_s, _FAST_S))
        self._set_ready(True)
        await asyncio.Event().wait()

    async def _liveness(self, probe: Probe) -> str:
        await asyncio.sleep(probe.initial_delay_s)
        failures = 0
        while failures < probe.failure_threshold:
            failure = await attempt(probe, self.pod.address)
            failures = failures + 1 if failure else 0
            await asyncio.sleep(probe.period_s)
        return f"its liveness probe failed {failures} times ({failure})"

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            self._around.changed()

    def _set(self, state: ProcessState, waiting_for: str = "") -> None:
        self.state = state
        self.waiting_for = waiting_for or self.waiting_for
        self._around.changed()

    def _cause(self, code: int, failures: int) -> str:
        lines = list(self._tail)
        text = "\n".join(lines)
        hint = next((hint for sign, hint in _HINTS if sign in text), "")
        if not hint and code == 2:
            hint = "it refused its arguments; the lines above say which, and the resource sets them"
        if not hint and code == -signal.SIGKILL:
            hint = "it was killed, probably because memory is short: see dmesg"
        times = f" {failures} times in a row" if failures > 1 else ""
        said = "".join(f"\n    {line}" for line in lines) or "\n    (it wrote nothing)"
        return (
            f"{self.label} could not start: {_ended(code)}{times}. Its last lines:{said}\n"
            + (f"  hint: {hint}\n" if hint else "")
            + f"  full log: {self.log_path}"
        )


def _ended(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
