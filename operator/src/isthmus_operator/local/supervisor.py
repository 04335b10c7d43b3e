"""All pods of a local service: start in order, watch, report, stop in order.

`run` ends when somebody asks it to stop (SIGINT, SIGTERM, SIGHUP) or when a container cannot start. However this
process ends, no container outlives it (child.py, guard.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from .console import Console
from .issuer import LocalIssuer
from .pods import START_FIRST, STOP_ORDER, Pod
from .process import ContainerProcess, Policy, Surroundings

_GUARD = str(Path(__file__).with_name("guard.py"))
_FIRST_PROGRESS_S = 3.0
_PROGRESS_S = 5.0
STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run, and with what. announce() is called once, when every pod is ready."""

    name: str
    namespace: str
    url: str
    pods: Sequence[Pod]
    run_dir: Path
    environment: dict[str, str]
    find_program: Callable[[str], str | None]
    announce: Callable[[], None]
    console: Console
    policy: Policy = field(default_factory=Policy)
    issuer: LocalIssuer = field(default_factory=LocalIssuer)


class _RunningPod:
    def __init__(self, pod: Pod, around: Surroundings) -> None:
        self.pod = pod
        self.init = [ContainerProcess(pod, container, around, init=True) for container in pod.init]
        self.containers = [ContainerProcess(pod, container, around) for container in pod.containers]
        self.current: list[ContainerProcess] = []
        self.ready = asyncio.Event()
        self.stopping = False
        self.task: asyncio.Task[None] | None = None

    async def run(self, fetching: asyncio.Lock) -> None:
        """Init containers one after another, then the containers together."""
        for process in self.init:
            # One at a time over all pods: they fill the same cache, and the next one finds it filled.
            async with fetching:
                if self.stopping:
                    return
                self.current = [process]
                await process.run()
        if self.stopping:
            return
        self.current = self.containers
        async with asyncio.TaskGroup() as group:
            for process in self.containers:
                group.create_task(process.run())

    def stop(self, *, kill: bool) -> None:
        self.stopping = True
        for process in self.current:
            if kill:
                process.kill()
            else:
                process.stop()


class Supervisor:
    """Runs a Launch once."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._guard: asyncio.subprocess.Process | None = None
        self._asked_to_stop = asyncio.Event()
        self._asked_to_kill = asyncio.Event()
        self._was_ready = False
        log_dir = launch.run_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        around = Surroundings(
            environment=launch.environment,
            find_program=launch.find_program,
            log=launch.console.log,
            say=launch.console.say,
            changed=self._changed,
            started=lambda group: self._tell_guard(f"+{group}"),
            ended=lambda group: self._tell_guard(f"-{group}"),
            was_ready=lambda: self._was_ready,
            policy=launch.policy,
            log_dir=log_dir,
        )
        self._pods = [_RunningPod(pod, around) for pod in launch.pods]

    async def run(self) -> int:
        """0 after a stop that was asked for. LaunchError when a container cannot start."""
        _prepare(self._launch.pods)
        tokens = [token for pod in self._launch.pods for token in pod.tokens]
        self._launch.issuer.write(tokens)
        renewal = asyncio.create_task(self._launch.issuer.keep(tokens, self._launch.console.say))
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        self._guard = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", _GUARD, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        self._changed()
        try:
            await self._run_pods()
        finally:
            await self._stop_pods()
            renewal.cancel()
            self._changed()
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            await self._guard.wait()
            for number in signals:
                loop.remove_signal_handler(number)
        return 0

    async def _run_pods(self) -> None:
        fetching = asyncio.Lock()
        first = [p for p in self._pods if p.pod.role in START_FIRST]
        rest = [p for p in self._pods if p.pod.role not in START_FIRST]
        for batch in (first, rest):
            for pod in batch:
                pod.task = asyncio.create_task(pod.run(fetching))
            if not await self._until_ready(batch):
                return
        self._was_ready = True
        self._changed()
        self._launch.announce()
        await self._until(self._asked_to_stop.wait())

    async def _until_ready(self, batch: list[_RunningPod]) -> bool:
        """Waits for a batch, saying what is being waited for. False when asked to stop meanwhile."""

        async def all_ready() -> None:
            for pod in batch:
                await pod.ready.wait()

        progress = asyncio.create_task(self._report_progress(batch))
        try:
            await self._until(all_ready(), self._asked_to_stop.wait())
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)
        return not self._asked_to_stop.is_set()

    async def _until(self, *events: Any) -> None:
        """Waits for the first of the events, or for a pod that fails; raises what it raised."""
        waits = {asyncio.ensure_future(event) for event in events}
        pods = {pod.task for pod in self._pods if pod.task is not None}
        try:
            while not any(wait.done() for wait in waits):
                done, _ = await asyncio.wait(waits | pods, return_when=asyncio.FIRST_COMPLETED)
                for task in done & pods:
                    task.result()
                    pods.discard(task)
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _report_progress(self, batch: list[_RunningPod]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        pause = _FIRST_PROGRESS_S
        while True:
            await asyncio.sleep(pause)
            pause = _PROGRESS_S
            for pod in batch:
                for process in () if pod.ready.is_set() else pod.current:
                    if not process.ready:
                        self._launch.console.say(
                            f"{process.label}: starting, {loop.time() - started:.0f} s ({process.waiting_for})"
                        )

    async def _stop_pods(self) -> None:
        """Routers first, so that requests in flight end; then the engines; then what those depend on."""
        named = [role for role in STOP_ORDER if role]
        for role in STOP_ORDER:
            tier = [p for p in self._pods if p.pod.role == role or (not role and p.pod.role not in named)]
            tasks = [pod.task for pod in tier if pod.task is not None]
            if not tasks:
                continue
            for pod in tier:
                pod.stop(kill=self._asked_to_kill.is_set())
            ended = asyncio.create_task(asyncio.wait(tasks))
            kill = asyncio.create_task(self._asked_to_kill.wait())
            await asyncio.wait((ended, kill), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                for pod in self._pods:
                    pod.stop(kill=True)
            await ended
            for task in tasks:
                # A failure is already the reason of this stop, or is said by the container itself.
                with contextlib.suppress(asyncio.CancelledError):
                    task.exception()
            kill.cancel()
            await asyncio.gather(kill, return_exceptions=True)

    def _on_signal(self) -> None:
        if self._asked_to_stop.is_set():
            self._launch.console.say("killing all pods")
            self._asked_to_kill.set()
            return
        self._launch.console.say("stopping: running requests may finish; once more to kill")
        self._asked_to_stop.set()

    def _tell_guard(self, line: str) -> None:
        assert self._guard is not None and self._guard.stdin is not None
        self._guard.stdin.write(line.encode() + b"\n")

    def _changed(self) -> None:
        for pod in self._pods:
            if pod.containers and all(process.ready for process in pod.containers):
                pod.ready.set()
            else:
                pod.ready.clear()
        write_state(self._launch.run_dir / "state.json", self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "name": self._launch.name,
            "namespace": self._launch.namespace,
            "pid": os.getpid(),
            "url": self._launch.url,
            "ready": self._was_ready and all(pod.ready.is_set() for pod in self._pods),
            "pods": [
                {
                    "name": pod.pod.name,
                    "role": pod.pod.role,
                    "address": pod.pod.address,
                    "ready": pod.ready.is_set(),
                    "containers": [
                        {
                            "name": process.container.name,
                            "state": process.state.value,
                            "pid": process.pid,
                            "ready": process.ready,
                            "restarts": process.restarts,
                            "lastExit": process.last_exit,
                            "ports": process.container.ports,
                            "log": str(process.log_path),
                        }
                        for process in pod.containers
                    ],
                }
                for pod in self._pods
            ],
        }


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Whole or not at all: readers never see half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _prepare(pods: Sequence[Pod]) -> None:
    for pod in pods:
        for folder in pod.folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in pod.files.items():
            file = Path(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as out:
                out.write(content)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one cause: containers of a pod fail together, and the first failure ended the others."""
    for error in group.exceptions:
        found = _first(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, LaunchError):
            return found
    return group
