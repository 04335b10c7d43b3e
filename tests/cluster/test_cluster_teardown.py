"""Nothing of a cluster stays on the machine: after a normal end, a failed start, and a killed owner."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import kube
import pytest
from testcluster import binaries, cli, settings, state
from testcluster import cluster as clusters
from testcluster.launch import StartError
from testcluster.settings import Settings

# Long: they start and end clusters of their own.
pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

CLUSTER_FOLDER = Path(__file__).resolve().parent
FIXED = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/containers", "/var/log/pods")


@pytest.fixture
def ours() -> Settings:
    return settings.load()


@pytest.fixture
def folder(ours: Settings, request: pytest.FixtureRequest) -> Iterator[Path]:
    path = cli.session_folder(ours, request.function.__name__.replace("_", "-"))
    yield path
    clusters.take_down(path)
    leave_no_logs = path.with_name(path.name + ".failed")
    subprocess.run(["rm", "-rf", str(leave_no_logs)], check=True)


def traces(folder: Path, cgroup: str, namespaces: set[str]) -> dict[str, list[str]]:
    """Everything on this machine that belongs to the cluster in `folder`."""
    processes: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            inside = os.readlink(entry / "ns/net") in namespaces
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if entry.name != str(os.getpid()) and (inside or str(folder) in command):
            processes.append(f"{entry.name} {command}")
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "processes": processes,
        "mounts": [one for one in mounts if str(folder) in one or any(f" {path}" in one for path in FIXED)],
        "cgroups": [str(one) for one in state.cgroup_roots(cgroup)],
        "files": [str(folder)] if folder.exists() else [],
    }


NOTHING: dict[str, list[str]] = {"processes": [], "mounts": [], "cgroups": [], "files": []}


@pytest.fixture
def full_machine(ours: Settings) -> None:
    kube.need(ours, binaries.FULL)
    try:
        clusters.require_host()
    except StartError as error:
        kube.missing(ours, str(error))


@pytest.mark.usefixtures("full_machine")
@pytest.mark.parametrize("crashed", [False, True], ids=["in-order", "after-a-crash"])
def test_full_cluster_leaves_nothing(ours: Settings, folder: Path, crashed: bool) -> None:
    there_before = [path for path in FIXED if Path(path).exists()]
    with closing(clusters.start_cluster(ours, folder, follow=True)) as running:
        known = state.load(folder)
        assert known is not None
        namespaces = {os.readlink(f"/proc/{process.pid}/ns/net") for process in known.processes}
        assert len(namespaces) == 3
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "runs"},
            "spec": {"containers": [{"name": "main", "image": "isthmus.test/pause:1"}]},
        }
        running.kubectl("wait", "--for=create", "serviceaccount/default", "--timeout=60s")
        running.apply(pod)
        running.kubectl("wait", "--for=condition=Ready", "pod/runs", "--timeout=120s")
        found = traces(folder, known.cgroup, namespaces)
        # Containers run, so there are cgroups to be removed; mounts never reach our own namespace.
        assert found["processes"] and found["cgroups"] and found["files"] and not found["mounts"]
        inside = [one for root in state.cgroup_roots(known.cgroup) for one in root.glob("node*/kubepods/*")]
        assert inside, "the pod's cgroups are elsewhere, and would be left there"
        if crashed:
            for process in known.processes:
                os.kill(process.pid, signal.SIGKILL)
    assert traces(folder, known.cgroup, namespaces) == NOTHING
    assert [path for path in FIXED if Path(path).exists()] == there_before
    assert clusters.take_down(folder) is False


@pytest.mark.usefixtures("full_machine")
def test_failed_start_leaves_nothing_but_logs(ours: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = binaries.find(ours)
    broken = replace(real, paths={**real.paths, "kubelet": Path("/bin/false")})
    monkeypatch.setattr(binaries, "find", lambda *_: broken)
    with pytest.raises(StartError, match=r"node[12]: kubelet ended with status 1"):
        clusters.start_cluster(ours, folder, follow=True)
    assert traces(folder, "", set()) == NOTHING
    assert (folder.with_name(folder.name + ".failed") / "node1" / "containerd.log").exists()


def test_cluster_ends_with_the_process_that_owns_it(ours: Settings, folder: Path) -> None:
    kube.need(ours, binaries.FAST)
    program = (
        f"import sys; sys.path.insert(0, {str(CLUSTER_FOLDER)!r})\n"
        "from pathlib import Path\n"
        "from testcluster import cluster, settings\n"
        f"running = cluster.start_control_plane(settings.load(), Path({str(folder)!r}), follow=True)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        assert any(line == "ready\n" for line in owner.stdout)
        known = state.load(folder)
        assert known is not None
        members = [pid for process in known.processes for pid in (process.pid, *state.children(process.pid))]
        assert len(members) == 6
        owner.kill()
    assert state.wait_gone(members, 60.0) == []
    assert clusters.take_down(folder) is True
    assert traces(folder, "", set()) == NOTHING
