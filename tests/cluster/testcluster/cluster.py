"""Brings clusters up and takes them down.

`start_control_plane`: API server, controller manager, scheduler and simulated nodes, on loopback; needs no root.
`start_cluster`: two nodes that run containers, in namespaces; needs root. `take_down` works on either, on what a
crash left of one, and twice.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from testcluster import binaries, certificates, images, network, state
from testcluster.commands import run
from testcluster.controlplane import ControlPlane, Ports, dns_service, free_ports
from testcluster.launch import Machine, StartError, launch
from testcluster.node import CNI_PLUGINS, PAUSE_IMAGE, Node, engine_mounts
from testcluster.programs import MachineSpec, Program
from testcluster.settings import CHECKOUT, Settings, child_environment
from testcluster.state import LeftoverError, State

FORWARD = Path(__file__).with_name("forward.py")
NAMESPACES_S = 30.0
UP_S = 300.0
NODES_READY = "180s"
STOP_S = 10.0
GPU = "nvidia.com/gpu"

# Programs of the machine itself that a full cluster calls, and the Debian package of each.
HOST_PROGRAMS = {
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "runc": "runc",
    "nft": "nftables",
    "iptables": "iptables",
    "ipset": "ipset",
    "conntrack": "conntrack",
    "openssl": "openssl",
    "busybox": "busybox-static",
}


@dataclass(slots=True, kw_only=True)
class Cluster:
    """A running cluster, or a user's own.

    `kubeconfig`: an administrator's. `server`: the API server's URL in it. `folder`: logs and state; empty for a
    user's own cluster. `nodes`: name -> process whose namespaces are the node's; empty unless this is a full cluster
    of ours. `machines`: those that this process started.
    """

    kubeconfig: Path
    kubectl_path: str
    folder: Path | None = None
    server: str = ""
    nodes: dict[str, int] = field(default_factory=dict)
    ctr_path: str = ""
    helm_path: str = ""
    machines: list[Machine] = field(default_factory=list)

    def close(self) -> None:
        """Take the cluster down, if it is one of ours, and remove all it made."""
        if self.folder is not None:
            take_down(self.folder)
        for machine in self.machines:
            machine.close()

    def kubectl(self, *arguments: str, manifest: object = None, timeout: float = 120.0) -> str:
        """Run kubectl and return what it printed; `manifest` is passed as JSON for `-f -`. Raises CommandError."""
        cache = [] if self.folder is None else [f"--cache-dir={self.folder / 'kubectl-cache'}"]
        command = [self.kubectl_path, f"--kubeconfig={self.kubeconfig}", *cache, *arguments]
        text = None if manifest is None else json.dumps(manifest)
        return run(command, label=f"kubectl {' '.join(arguments)}", text=text, timeout=timeout)

    def apply(self, *objects: object, namespace: str = "default") -> None:
        """Server-side apply."""
        items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--server-side", f"--namespace={namespace}", "-f", "-", manifest=items)

    def get(self, *arguments: str) -> Any:
        """`kubectl get ... -o json`, parsed."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def helm(self, *arguments: str, timeout: float = 120.0) -> str:
        """Run helm and return what it printed; raises CommandError."""
        return run([self.helm_path, *arguments, f"--kubeconfig={self.kubeconfig}"], timeout=timeout)

    def add_simulated_node(
        self, name: str, *, cpu: str = "32", memory: str = "256Gi", pods: int = 110, gpus: int = 0
    ) -> None:
        """Add a node whose kubelet and containers are played by kwok. Its pods turn Ready at once."""
        capacity = {"cpu": cpu, "memory": memory, "pods": str(pods), **({GPU: str(gpus)} if gpus else {})}
        metadata = {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "type": "kwok"},
        }
        status = {"capacity": capacity, "allocatable": capacity}
        self.kubectl(
            "create", "-f", "-", manifest={"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}
        )

    def set_gpus(self, node: str, count: int) -> None:
        """Advertise `count` GPUs on a node, as their device plugin would."""
        patch = json.dumps({"status": {"capacity": {GPU: str(count)}, "allocatable": {GPU: str(count)}}})
        self.kubectl("patch", "node", node, "--subresource=status", "--type=merge", f"--patch={patch}")

    def import_image(self, archive: Path) -> None:
        """Load an image archive (docker or OCI) into every node of ours."""
        for node in self.nodes:
            self.run_on(node, [self.ctr_path, "--namespace=k8s.io", "images", "import", "--local", str(archive)])

    def show_folder(self, here: Path, place: Path) -> None:
        """Show a folder of this machine at `place`, below /var/lib, on every node of ours, and nowhere else: /var/lib
        of a node becomes a layer over the machine's, which ends with the node."""
        for node in self.nodes:
            layer = f"{self.folder}/{node}-var-lib"
            script = (
                f"mountpoint -q {place} && exit 0; mkdir -p {layer}/upper {layer}/work; "
                f"mountpoint -q /var/lib || mount -t overlay overlay"
                f" -o lowerdir=/var/lib,upperdir={layer}/upper,workdir={layer}/work /var/lib; "
                f"mkdir -p {place}; mount --bind {here} {place}"
            )
            self.run_on(node, ["sh", "-ec", script])

    def enter(self, machine: str) -> list[str]:
        """The command prefix that runs a program on a node: in its mounts, network and processes."""
        pid = self.nodes[machine]
        # `unshare` itself is outside the process namespace that it made.
        return ["nsenter", f"--target={pid}", "--mount", "--net", f"--pid=/proc/{pid}/ns/pid_for_children", "--"]

    def run_on(self, machine: str, command: Sequence[str], timeout: float = 120.0) -> str:
        """Run a program on a node and return what it printed; raises CommandError."""
        return run([*self.enter(machine), *command], label=f"{machine}: {' '.join(command)}", timeout=timeout)

    @contextmanager
    def forward(self, address: str, port: int) -> Iterator[int]:
        """Reach a pod or Service address of ours: yields a loopback port that leads to `address:port` from node 1."""
        first = next(iter(self.nodes))
        listener = socket.create_server(("127.0.0.1", 0))
        prefix = network.enter(self.nodes[first])
        with listener, forwarder(prefix, listener, f"{address}:{port}"):
            yield int(listener.getsockname()[1])


@contextmanager
def forwarder(prefix: Sequence[str], listener: socket.socket, target: str) -> Iterator[None]:
    """Run forward.py for as long as the context lasts."""
    descriptor = listener.fileno()
    process = subprocess.Popen(
        [*prefix, sys.executable, "-I", str(FORWARD), str(descriptor), target],
        stdin=subprocess.PIPE,
        pass_fds=[descriptor],
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def start_control_plane(settings: Settings, folder: Path, *, follow: bool, pod_address: str = "") -> Cluster:
    """Start the light form in `folder`: everything but containers, with simulated nodes; on loopback, as any user.

    `pod_address`: what simulated pods give as theirs; empty: addresses that nothing answers at.
    """
    programs = binaries.find(settings, binaries.FAST)
    ours = begin(folder)
    plane = ControlPlane(
        folder=folder,
        binaries=programs,
        address="127.0.0.1",
        ports=free_ports(),
        advertised=False,
        nodes=(),
        pod_address=pod_address,
    )
    admin = plane.prepare()
    kubeconfig = certificates.write_kubeconfig(
        folder / "kubeconfig", server=plane.server, authority=plane.authority, who=admin
    )
    with undone_on_error(folder) as machines:
        spec = MachineSpec(name="control-plane", namespaces=False, follow=follow)
        machine = launch(spec, [*plane.programs(), plane.kwok()], ours, folder)
        machines.append(machine)
        machine.wait_for("prepared", NAMESPACES_S)
        machine.go()
        machine.wait_for("up", UP_S)
    return Cluster(
        kubeconfig=kubeconfig,
        kubectl_path=programs["kubectl"],
        folder=folder,
        server=plane.server,
        machines=machines,
    )


def start_cluster(settings: Settings, folder: Path, *, follow: bool, gpus: int = 0) -> Cluster:
    """Start the full form in `folder`: a control plane and two nodes, each advertising `gpus` GPUs. Needs root."""
    programs = binaries.find(settings)
    require_host()
    ours = begin(folder)
    # Found by name on every machine, and by nobody else: two checkouts may run a cluster each.
    ours.cgroup = f"/isthmus-{os.getpid()}-{time.monotonic_ns() % 10**9}"
    nodes = [
        Node(
            number=number,
            folder=folder / f"node{number}",
            binaries=programs,
            control_plane=folder,
            cgroup=f"{ours.cgroup}/node{number}",
            mounts=engine_mounts(CHECKOUT),
        )
        for number in (1, 2)
    ]
    plane = ControlPlane(
        folder=folder,
        binaries=programs,
        address=network.CONTROL_PLANE,
        ports=Ports(),
        advertised=True,
        nodes=tuple(node.name for node in nodes),
    )
    with undone_on_error(folder) as machines:
        admin = plane.prepare()
        for node in nodes:
            node.prepare()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = f"https://127.0.0.1:{listener.getsockname()[1]}"
            start_machines(plane, nodes, listener, ours, machines, follow=follow)
        kubeconfig = certificates.write_kubeconfig(
            folder / "kubeconfig", server=server, authority=plane.authority, who=admin
        )
        cluster = Cluster(
            kubeconfig=kubeconfig,
            kubectl_path=programs["kubectl"],
            folder=folder,
            server=server,
            nodes={node.name: machine.pid for node, machine in zip(nodes, machines[1:], strict=True)},
            ctr_path=programs["ctr"],
            helm_path=programs["helm"],
            machines=machines,
        )
        furnish(cluster, gpus)
    return cluster


def start_machines(
    plane: ControlPlane,
    nodes: Sequence[Node],
    listener: socket.socket,
    ours: State,
    machines: list[Machine],
    *,
    follow: bool,
) -> None:
    """Make the namespaces, wire them, then start the programs: the control plane first. Fills `machines`."""
    api = Program(
        name="api-forward",
        argv=(sys.executable, "-I", str(FORWARD), str(listener.fileno()), f"{plane.address}:{plane.ports.api}"),
        fds=(listener.fileno(),),
    )
    spec = MachineSpec(name="control-plane", namespaces=True, follow=follow, sysctls={"net/ipv4/ip_forward": "1"})
    machines.append(launch(spec, [*plane.programs(), api, plane.coredns()], ours, plane.folder))
    for node in nodes:
        machines.append(launch(node.machine(follow=follow), node.programs(), ours, node.folder))
    hub, *spokes = machines
    for machine in machines:
        machine.wait_for("prepared", NAMESPACES_S)
    network.connect(hub.pid, [(node, machine.pid) for node, machine in zip(nodes, spokes, strict=True)])
    hub.go()
    hub.wait_for("up", UP_S)
    for machine in spokes:
        machine.go()
    for machine in spokes:
        machine.wait_for("up", UP_S)


def furnish(cluster: Cluster, gpus: int) -> None:
    """Load the images that every pod needs, register DNS, and wait until the nodes are Ready."""
    assert cluster.folder is not None
    archive = images.write_busybox_image(
        cluster.folder / "pause.tar", PAUSE_IMAGE, command=["/bin/sleep", "infinity"], user="65534"
    )
    cluster.import_image(archive)
    cluster.apply(*dns_service(network.CONTROL_PLANE), namespace="kube-system")
    for node in cluster.nodes:
        cluster.kubectl("wait", "--for=create", f"node/{node}", f"--timeout={NODES_READY}", timeout=200)
        cluster.kubectl("wait", "--for=condition=Ready", f"node/{node}", f"--timeout={NODES_READY}", timeout=200)
        if gpus:
            cluster.set_gpus(node, gpus)


def begin(folder: Path) -> State:
    """Claim `folder` for a new cluster; raises StartError if one runs there, cleans up what a crashed one left."""
    before = state.load(folder)
    if before is not None and all(process.alive() for process in before.processes) and before.processes:
        raise StartError(f"a cluster already runs in {folder}; take it down first: make cluster-down")
    take_down(folder)
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    fresh = State(folder)
    fresh.save()
    return fresh


@contextmanager
def undone_on_error(folder: Path) -> Iterator[list[Machine]]:
    """Yield a list for the machines; take a half-made cluster down again, its logs kept in `<folder>.failed`."""
    machines: list[Machine] = []
    try:
        yield machines
    except BaseException:
        keep_logs(folder)
        take_down(folder)
        for machine in machines:
            machine.close()
        raise


def keep_logs(folder: Path) -> None:
    kept = folder.with_name(folder.name + ".failed")
    shutil.rmtree(kept, ignore_errors=True)
    for log in folder.rglob("*.log"):
        target = kept / log.relative_to(folder)
        if "containerd-root" not in log.parts:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(log, target)
    print(f"cluster: the logs of the failed start are in {kept}", file=sys.stderr, flush=True)


def take_down(folder: Path) -> bool:
    """Stop the cluster in `folder` and remove everything it made. False if there was none.

    Raises LeftoverError if a process or a cgroup outlives the deadlines; calling it again continues.
    """
    ours = state.load(folder)
    if ours is None:
        shutil.rmtree(folder, ignore_errors=True)
        return False
    # The nodes first: without an API server they would only complain.
    for process in reversed(ours.processes):
        stop(process)
    state.remove_cgroups(ours.cgroup)
    shutil.rmtree(folder, onerror=unless_gone)
    return True


def unless_gone(_: object, __: str, error: tuple[type[BaseException], BaseException, TracebackType]) -> None:
    """Two runs of the tests may take down what an earlier one left, at the same time."""
    if not issubclass(error[0], FileNotFoundError):
        raise error[1]


def stop(process: state.Process) -> None:
    """End one machine: SIGTERM to its first process, then SIGKILL. The kernel ends all else in its namespaces."""
    if not process.alive():
        return
    inner = state.children(process.pid)
    members = [process.pid, *inner]
    # With namespaces, `unshare` waits for the first process inside and ignores SIGTERM itself.
    unshared = b"unshare" in state.command_line(process.pid).split(b"\0")[0]
    for number, seconds in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        for pid in inner if unshared and number == signal.SIGTERM else [process.pid]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        if not state.wait_gone(members, seconds):
            return
    raise LeftoverError(f"{process.name} (process {process.pid}) still runs {STOP_S:.0f} s after SIGKILL")


def require_host() -> None:
    """Raise StartError that lists everything this machine lacks for a full cluster."""
    lacks: list[str] = []
    if os.geteuid() != 0:
        lacks.append("root (it makes network namespaces and runs containers)")
    packages = sorted({package for program, package in HOST_PROGRAMS.items() if shutil.which(program) is None})
    if not Path(CNI_PLUGINS, "bridge").exists():
        packages.append("containernetworking-plugins")
    if packages:
        lacks.append(f"programs: apt-get install {' '.join(packages)}")
    if lacks:
        raise StartError("a full cluster needs " + "; ".join(lacks))


def attach(settings: Settings, folder: Path) -> Cluster | None:
    """The full cluster that runs in `folder`, started by an earlier process; None if there is none."""
    ours = state.load(folder)
    if ours is None or not ours.processes or not all(process.alive() for process in ours.processes):
        return None
    programs = binaries.find(settings)
    kubeconfig = folder / "kubeconfig"
    return Cluster(
        kubeconfig=kubeconfig,
        kubectl_path=programs["kubectl"],
        folder=folder,
        server=json.loads(kubeconfig.read_text())["clusters"][0]["cluster"]["server"],
        nodes={process.name: process.pid for process in ours.processes if process.name.startswith("node")},
        ctr_path=programs["ctr"],
        helm_path=programs["helm"],
    )


def external(settings: Settings, kubeconfig: Path) -> Cluster:
    """A user's own cluster: nothing is started, and only what the API offers can be done."""
    found = shutil.which("kubectl", path=child_environment().get("PATH"))
    kubectl = found or binaries.find(settings, ("kubectl",))["kubectl"]
    helm = shutil.which("helm") or ""
    return Cluster(kubeconfig=kubeconfig, kubectl_path=kubectl, helm_path=helm)
