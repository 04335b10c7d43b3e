"""A worker node: containerd, kubelet, kube-proxy and kube-router's firewall, and the pod network between nodes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster.binaries import Binaries
from testcluster.commands import run
from testcluster.controlplane import DNS_SERVICE, DOMAIN, SERVICE_CIDR
from testcluster.programs import MachineSpec, Program

PAUSE_IMAGE = "isthmus.test/pause:1"
POD_CIDR = "10.244.0.0/16"
CNI_PLUGINS = "/usr/lib/cni"
SOCKET = "/run/containerd/containerd.sock"

# Folders that kubelet, containerd and CNI plugins use whatever they are told: each node has its own in their place.
FIXED_FOLDERS = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/containers", "/var/log/pods")

# Settings of the whole machine that kubelet wants (and writes, where it may). The node only believes to have them.
KUBELET_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def engine_mounts(checkout: Path) -> dict[str, Path]:
    """What engine.Dockerfile expects on a node, as far as the checkout has it: libraries and kernels."""
    wanted = {"/opt/host/kernels": checkout / "kernels"}
    for site in (checkout / ".venv" / "lib").glob("python3.*/site-packages"):
        wanted["/opt/host/site-packages"] = site
    return {target: source for target, source in wanted.items() if source.is_dir()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node: `number` counts from 1 and gives its addresses; `cgroup` is the parent of its pods' cgroups.

    `mounts`: container path -> host folder, read-only in every container of the node whatever its pod says.
    """

    number: int
    folder: Path
    binaries: Binaries
    control_plane: Path
    cgroup: str
    mounts: Mapping[str, Path]

    @property
    def name(self) -> str:
        return f"node{self.number}"

    @property
    def address(self) -> str:
        return f"10.0.0.{10 + self.number}"

    @property
    def pod_cidr(self) -> str:
        return f"10.244.{self.number}.0/24"

    def machine(self, *, follow: bool) -> MachineSpec:
        """Its namespaces: own folders over the fixed ones, forwarding on, bridged packets seen by nftables."""
        return MachineSpec(
            name=self.name,
            namespaces=True,
            follow=follow,
            cgroup=self.cgroup,
            binds=[(str(self.folder / Path(target).name), target) for target in FIXED_FOLDERS],
            sysctls={"net/ipv4/ip_forward": "1", "net/bridge/bridge-nf-call-iptables": "1"},
            shadow_sysctls=KUBELET_SYSCTLS,
        )

    def prepare(self) -> None:
        """Write every configuration file and make the folders."""
        for target in FIXED_FOLDERS:
            (self.folder / Path(target).name).mkdir(parents=True, exist_ok=True)
        for name in ("containerd-root", "containerd-opt", "cni-conf", "manifests", "volume-plugins"):
            (self.folder / name).mkdir(exist_ok=True)
        # Nothing is resolved outside the cluster.
        (self.folder / "resolv.conf").write_text(f"nameserver {DNS_SERVICE}\n")
        (self.folder / "cni-conf" / "10-pods.conflist").write_text(json.dumps(self.cni(), indent=1))
        (self.folder / "container.json").write_text(json.dumps(self.container_template(), indent=1))
        (self.folder / "containerd.toml").write_text(self.containerd_toml())
        (self.folder / "kubelet.json").write_text(json.dumps(self.kubelet_configuration(), indent=1))

    def programs(self) -> list[Program]:
        """containerd, kubelet, kube-proxy and kube-router, in the order they start."""
        return [self.containerd(), self.kubelet(), self.kube_proxy(), self.kube_router()]

    def containerd(self) -> Program:
        return Program(
            name="containerd",
            argv=(self.binaries["containerd"], "--config", str(self.folder / "containerd.toml")),
            # The shim is found by PATH, as are runc, mount and ip.
            env={"PATH": f"{self.binaries.folders()}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            socket=SOCKET,
        )

    def kubelet(self) -> Program:
        return Program(
            name="kubelet",
            argv=(
                self.binaries["kubelet"],
                f"--kubeconfig={self.control_plane / f'kubelet-{self.name}.kubeconfig'}",
                f"--config={self.folder / 'kubelet.json'}",
                f"--hostname-override={self.name}",
                f"--node-ip={self.address}",
            ),
            url="http://127.0.0.1:10248/healthz",
        )

    def kube_proxy(self) -> Program:
        return Program(
            name="kube-proxy",
            argv=(
                self.binaries["kube-proxy"],
                f"--kubeconfig={self.control_plane / 'kube-proxy.kubeconfig'}",
                f"--hostname-override={self.name}",
                "--proxy-mode=nftables",
                f"--cluster-cidr={POD_CIDR}",
                "--healthz-bind-address=127.0.0.1:10256",
                # Connection tracking limits are the whole machine's: leave them alone.
                "--conntrack-max-per-core=0",
                "--conntrack-min=0",
                "--conntrack-tcp-timeout-established=0",
                "--conntrack-tcp-timeout-close-wait=0",
                "--oom-score-adj=0",
            ),
            url="http://127.0.0.1:10256/livez",
        )

    def kube_router(self) -> Program:
        """Its firewall alone, which enforces NetworkPolicies for whatever network plugin there is."""
        return Program(
            name="kube-router",
            argv=(
                self.binaries["kube-router"],
                f"--kubeconfig={self.control_plane / 'kube-router.kubeconfig'}",
                f"--hostname-override={self.name}",
                "--run-firewall=true",
                "--run-router=false",
                "--run-service-proxy=false",
                "--enable-cni=false",
                f"--service-cluster-ip-range={SERVICE_CIDR}",
            ),
            url="http://127.0.0.1:20244/healthz",
        )

    def cni(self) -> dict[str, object]:
        """A bridge per node; the nodes' routing tables join them."""
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": self.pod_cidr}]],
                "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": str(self.folder / "cni" / "networks"),
            },
        }
        port_map = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, port_map]}

    def container_template(self) -> dict[str, object]:
        """What every container starts from: containerd's own default and `mounts`."""
        template: dict[str, Any] = json.loads(run([self.binaries["ctr"], "oci", "spec"]))
        for target, source in self.mounts.items():
            options = ["rbind", "ro", "nosuid", "nodev"]
            entry = {"destination": target, "type": "bind", "source": str(source), "options": options}
            template["mounts"].append(entry)
        # ctr's limit of 1024 open files is not what the CRI plugin gives a container.
        template["process"].pop("rlimits", None)
        return template

    def containerd_toml(self) -> str:
        cri = "io.containerd.cri.v1"
        return f"""\
version = 3
root = "{self.folder}/containerd-root"
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp"]

[grpc]
address = "{SOCKET}"

[plugins."io.containerd.internal.v1.opt"]
path = "{self.folder}/containerd-opt"

[plugins."{cri}.images"]
snapshotter = "overlayfs"

[plugins."{cri}.images".pinned_images]
sandbox = "{PAUSE_IMAGE}"

[plugins."{cri}.runtime"]
disable_apparmor = true
disable_hugetlb_controller = true
tolerate_missing_hugetlb_controller = true
# A machine without CAP_SYS_RESOURCE may not lower a score below its own.
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true

[plugins."{cri}.runtime".cni]
bin_dirs = ["{CNI_PLUGINS}"]
conf_dir = "{self.folder}/cni-conf"

[plugins."{cri}.runtime".containerd]
default_runtime_name = "runc"

[plugins."{cri}.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{self.folder}/container.json"

[plugins."{cri}.runtime".containerd.runtimes.runc.options]
SystemdCgroup = false
"""

    def kubelet_configuration(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.control_plane / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "clusterDNS": [DNS_SERVICE],
            "clusterDomain": DOMAIN,
            "resolvConf": str(self.folder / "resolv.conf"),
            "podLogsDir": "/var/log/pods",
            "volumePluginDir": str(self.folder / "volume-plugins"),
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": True,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "oomScoreAdj": 0,
            # The disk is shared with everything else on the machine: its fill level says nothing about the node.
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "registerWithTaints": [],
            "readOnlyPort": 0,
        }
