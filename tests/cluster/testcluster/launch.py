"""Starts machines and waits for what they report."""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testcluster.programs import MachineSpec, Program
from testcluster.settings import child_environment
from testcluster.state import State

MACHINE = Path(__file__).with_name("machine.py")
UNSHARE = ("unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")


class StartError(RuntimeError):
    """A machine or one of its programs did not come up."""


@dataclass(slots=True)
class Machine:
    """A started machine. `pid` is the process whose mount and network namespaces are the machine's."""

    spec: MachineSpec
    process: subprocess.Popen[bytes]
    pending: bytes = b""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_for(self, event: str, seconds: float) -> None:
        """Read reports until `event`; raises StartError when it fails, ends, or is late."""
        deadline = time.monotonic() + seconds
        for report in self.reports(deadline):
            if report["event"] == "ready":
                self.seconds[report["name"]] = report["seconds"]
                print(f"cluster: {self.spec.name}: {report['name']} ready in {report['seconds']:.1f} s", flush=True)
            if report["event"] == "failed":
                raise StartError(f"{self.spec.name}: {report['error']}")
            if report["event"] == event:
                return
        status = self.process.poll()
        late = f"not {event} after {seconds:.0f} s" if status is None else f"ended with status {status}"
        raise StartError(f"machine {self.spec.name}: {late}")

    def reports(self, deadline: float) -> Any:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while True:
                while b"\n" in self.pending:
                    line, _, self.pending = self.pending.partition(b"\n")
                    yield json.loads(line)
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return
                chunk = os.read(descriptor, 65536)
                if not chunk:
                    return
                self.pending += chunk

    def go(self) -> None:
        """Let it start its programs. A machine that follows keeps our end of the pipe; others are let go."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()
        if not self.spec.follow:
            self.process.stdin.close()

    def close(self) -> None:
        """Collect the ended process and close our ends of its pipes."""
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def launch(spec: MachineSpec, programs: Sequence[Program], state: State, folder: Path) -> Machine:
    """Start the machine, its files under `folder`, and note its process in `state`."""
    path = spec.write(folder, programs)
    command = [sys.executable, "-I", str(MACHINE), str(path)]
    descriptors = tuple(descriptor for program in programs for descriptor in program.fds)
    with (folder / "machine.log").open("ab") as log:
        process = subprocess.Popen(
            [*UNSHARE, *command] if spec.namespaces else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=child_environment(),
            pass_fds=descriptors,
            # A Ctrl-C meant for the caller must not reach the cluster: the caller takes it down in order.
            start_new_session=True,
        )
    state.add_process(spec.name, process.pid)
    return Machine(spec, process)
