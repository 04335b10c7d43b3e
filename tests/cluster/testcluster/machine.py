"""One machine of the cluster: the first process of its namespaces, which prepares them and starts its programs.

Run as `python -I machine.py SPEC.json`, in fresh namespaces (`unshare`) or, for a control plane alone, in the
caller's. Protocol: one JSON object a line on standard output (`prepared`, `started`, `ready`, `failed`, `up`), then
standard output closes; one line on standard input after `prepared` starts the programs. With `follow` in the SPEC the
machine stops when standard input ends, so that it cannot outlive a test run. SIGTERM stops it.

Everything it starts dies with it: by PID namespace where it has one, else by the parent-death signal.
Standard library only, and no imports from this package: it runs isolated.
"""

import ctypes
import json
import os
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
POLL_S = 0.05
STOP_GRACE_S = 3.0
libc = ctypes.CDLL(None, use_errno=True)


class MachineError(RuntimeError):
    """A program did not start; says which, why, and the end of its log."""


@dataclass(slots=True)
class Child:
    name: str
    pid: int
    log: Path
    status: int | None = None


class Machine:
    """Starts the programs in order, each when the one before is ready, and reaps whatever dies."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.children: dict[str, Child] = {}
        self.selector = selectors.DefaultSelector()
        self.stopping = False
        self.started = False
        wake_read, wake_write = socket.socketpair()
        for end in (wake_read, wake_write):
            end.setblocking(False)
        self.wake = wake_read
        self.wake_write = wake_write
        signal.set_wakeup_fd(wake_write.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self.on_signal)
        self.selector.register(wake_read, selectors.EVENT_READ, "wake")
        self.selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "stdin")

    def on_signal(self, number: int, _frame: object) -> None:
        if number != signal.SIGCHLD:
            self.stopping = True

    def turn(self, timeout: float | None) -> None:
        """Wait for a signal, for standard input or for `timeout` seconds; reap the dead."""
        for key, _ in self.selector.select(timeout):
            if key.data == "wake":
                self.wake.recv(4096)
            elif os.read(sys.stdin.fileno(), 4096):
                self.started = True
            else:
                self.selector.unregister(sys.stdin.fileno())
                self.stopping = self.stopping or self.spec["follow"] or not self.started
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for child in self.children.values():
                if child.pid == pid:
                    child.status = os.waitstatus_to_exitcode(status)

    def start(self, program: dict[str, Any]) -> None:
        """Start one program and wait until it is ready; raises MachineError."""
        log = Path(program["log"])
        child = Child(program["name"], spawn(program, log), log)
        self.children[child.name] = child
        begin = time.monotonic()
        say("started", name=child.name, pid=child.pid)
        probe = program.get("ready")
        while probe is not None and not self.stopping:
            if is_ready(probe):
                break
            self.turn(POLL_S)
            waited = time.monotonic() - begin
            if child.status is not None:
                raise MachineError(f"{child.name} ended with status {child.status} after {waited:.1f} s{tail(log)}")
            if waited > probe["deadline"]:
                raise MachineError(f"{child.name} not ready after {waited:.0f} s ({describe(probe)}){tail(log)}")
        say("ready", name=child.name, seconds=round(time.monotonic() - begin, 2))

    def stop(self) -> None:
        """End every program: SIGTERM to all, STOP_GRACE_S later SIGKILL."""
        for number, grace in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, STOP_GRACE_S)):
            alive = [child for child in self.children.values() if child.status is None]
            for child in alive:
                os.kill(child.pid, number)
            deadline = time.monotonic() + grace
            while any(child.status is None for child in alive) and time.monotonic() < deadline:
                self.turn(POLL_S)


def spawn(program: dict[str, Any], log: Path) -> int:
    """Fork and execute; the child dies when this process dies, and writes to `log`."""
    keep = program.get("fds", [])
    pid = os.fork()
    if pid:
        return pid
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for descriptor in keep:
            os.set_inheritable(descriptor, True)
        os.execve(program["argv"][0], program["argv"], {**os.environ, **program.get("env", {})})
    except OSError as error:
        print(f"cannot execute {program['argv'][0]}: {error}", file=sys.stderr, flush=True)
    os._exit(127)


def is_ready(probe: dict[str, Any]) -> bool:
    """Try the probe once: `url` must answer 200, `socket` must accept."""
    if "socket" in probe:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1.0)
            try:
                client.connect(probe["socket"])
            except OSError:
                return False
            return True
    # Readiness only: nothing secret is sent, and the certificate is made a moment before.
    trust_any = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(probe["url"], timeout=2.0, context=trust_any) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def describe(probe: dict[str, Any]) -> str:
    return str(probe.get("url") or probe.get("socket"))


def tail(log: Path, lines: int = 15) -> str:
    text = log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else []
    return f"; the end of {log}:\n" + "\n".join(text)


def prepare(spec: dict[str, Any]) -> None:
    """Make the namespaces ours: own hostname, /run, state folders and kernel settings."""
    if not spec["namespaces"]:
        return
    socket.sethostname(spec["name"])
    # Peers among our own mounts, so that what kubelet mounts appears in containers; still cut off from the host.
    mount("--make-rshared", "/")
    mount("-t", "tmpfs", "-o", "mode=755,size=256m", "tmpfs", "/run")
    for parent in sorted({str(Path(target).parent) for _, target in spec["binds"]}):
        overlay(parent)
    for source, target in spec["binds"]:
        Path(target).mkdir(exist_ok=True)
        mount("--bind", source, target)
    if spec["cgroup"]:
        confine_cgroups(spec["cgroup"].strip("/"))
    shadow_kernel_settings(spec["shadow_sysctls"])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for path, value in spec["sysctls"].items():
        Path("/proc/sys", path).write_text(value)


def shadow_kernel_settings(settings: dict[str, str]) -> None:
    """Put plain files over kernel settings that are the whole machine's, holding the value kubelet wants.

    Kubelet insists on them and would write them; the host's own stay as they are.
    """
    folder = Path("/run/sysctl")
    folder.mkdir()
    for path, value in settings.items():
        target = Path("/proc/sys", path)
        if target.exists():
            shadow = folder / path.replace("/", ".")
            shadow.write_text(value + "\n")
            mount("--bind", str(shadow), str(target))


def overlay(folder: str) -> None:
    """Mount over `folder` a view of it in which mount points can be made without making them on the host.

    Making and removing them there would not do: the kernel unmounts what any namespace has on a folder that is removed.
    """
    layers = Path("/run/overlay", folder.strip("/").replace("/", "."))
    for name in ("upper", "work"):
        (layers / name).mkdir(parents=True)
    options = f"lowerdir={folder},upperdir={layers / 'upper'},workdir={layers / 'work'}"
    mount("-t", "overlay", "-o", options, "overlay", folder)


def confine_cgroups(cgroup: str) -> None:
    """Make `cgroup` in every hierarchy and mount it over the hierarchy's root.

    kubelet and containerd then do as they always do, and all their cgroups are below ours: two nodes share none, and
    `take_down` finds them again.
    """
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    # Fields: id, parent, device, root, mount point, options, optional ones, "-", type.
    roots = {fields[4]: fields[fields.index("-") + 1] for fields in mounts}
    for root, kind in roots.items():
        if kind not in ("cgroup", "cgroup2"):
            continue
        folder = Path(root)
        for part in cgroup.split("/"):
            parent, folder = folder, folder / part
            folder.mkdir(exist_ok=True)
            inherit(parent, folder)
        # The old root has to go: runc would find it first, and look for containers' cgroups there.
        spare = Path("/run/cgroup-root")
        spare.mkdir(exist_ok=True)
        mount("--bind", str(folder), str(spare))
        subprocess.run(["umount", root], check=True)
        mount("--bind", str(spare), root)
        subprocess.run(["umount", str(spare)], check=True)


def inherit(parent: Path, child: Path) -> None:
    """Give a new cgroup what the kernel does not: the processors of a v1 cpuset, the controllers of v2."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (child / name).exists() and not (child / name).read_text().strip():
            (child / name).write_text((parent / name).read_text())
    if (parent / "cgroup.subtree_control").exists():
        controllers = (parent / "cgroup.controllers").read_text().split()
        (parent / "cgroup.subtree_control").write_text(" ".join(f"+{one}" for one in controllers))


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    for descriptor in [one for program in spec["programs"] for one in program["fds"]]:
        os.set_inheritable(descriptor, False)
    prepare(spec)
    machine = Machine(spec)
    say("prepared")
    while not machine.started and not machine.stopping:
        machine.turn(None)
    try:
        for program in spec["programs"]:
            if machine.stopping:
                break
            machine.start(program)
    except MachineError as error:
        machine.stop()
        say("failed", error=str(error))
        return 1
    if not machine.stopping:
        say("up")
    # The reader of our events is done with us, and may be gone for good.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while not machine.stopping:
        machine.turn(None)
    machine.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
