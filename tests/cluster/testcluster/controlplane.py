"""The control plane: etcd, API server, controller manager, scheduler, and DNS or simulated nodes beside them."""

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from testcluster import certificates
from testcluster.binaries import Binaries
from testcluster.programs import Program

SERVICE_CIDR = "10.96.0.0/16"
FIRST_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
DOMAIN = "cluster.local"
SIMULATED = Path(__file__).with_name("simulated.yaml")
POD_ADDRESSES = re.compile(r"\{\{ with PodIPsWith .*?\{\{ end \}\}", re.DOTALL)
# Requests of the accounts in the operator's namespace, in `audit.log` beside it: tests compare them with its rights.
# Writes of the administrator too, as whom tests run most operators: with nothing to do there are none.
AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    userGroups: [system:serviceaccounts:isthmus-system]
  - level: Metadata
    users: [admin]
    verbs: [create, update, patch, delete]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where the control plane listens; in a network namespace of its own the usual numbers are free."""

    etcd: int = 2379
    etcd_peer: int = 2380
    api: int = 6443
    controller_manager: int = 10257
    scheduler: int = 10259
    kwok: int = 10247


_taken: list[socket.socket] = []
"""Bound as long as this process lives."""


def free_ports() -> Ports:
    """Ports of loopback that the kernel gives to nobody who asks for any, and servers that set SO_REUSEADDR may use."""
    sockets = [socket.socket() for _ in range(6)]
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
    _taken.extend(sockets)
    numbers = [int(one.getsockname()[1]) for one in sockets]
    etcd, peer, api, manager, scheduler, kwok = numbers
    return Ports(etcd=etcd, etcd_peer=peer, api=api, controller_manager=manager, scheduler=scheduler, kwok=kwok)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlane:
    """Files and addresses of one control plane.

    `address`: where the API server listens for the cluster. `advertised`: whether it stands behind the `kubernetes`
    Service; a loopback address cannot. `pod_address`: the one address that every simulated pod has, where something
    answers for them; empty: each has its own, and nothing does.
    """

    folder: Path
    binaries: Binaries
    address: str
    ports: Ports
    advertised: bool
    nodes: tuple[str, ...]
    pod_address: str = ""

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.ports.api}"

    @property
    def authority(self) -> Path:
        return self.folder / "ca.crt"

    def prepare(self) -> certificates.Identity:
        """Write keys, tokens and each component's kubeconfig; return the administrator."""
        admin = certificates.identity("admin", "system:masters")
        members = {
            "kube-controller-manager": certificates.identity("system:kube-controller-manager"),
            "kube-scheduler": certificates.identity("system:kube-scheduler"),
            "kube-proxy": certificates.identity("system:kube-proxy", "system:node-proxier"),
            # They read, and kwok writes, what a role of their own would have to list.
            "kube-router": certificates.identity("kube-router", "system:masters"),
            "coredns": certificates.identity("coredns", "system:masters"),
            "kwok": certificates.identity("kwok", "system:masters"),
            **{f"kubelet-{node}": certificates.identity(f"system:node:{node}", "system:nodes") for node in self.nodes},
        }
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{DOMAIN}"]
        addresses = sorted({"127.0.0.1", self.address, FIRST_SERVICE})
        certificates.make_authority(self.folder)
        certificates.make_server_certificate(self.folder, [*names, "localhost"], addresses)
        certificates.make_kubelet_client_certificate(self.folder)
        certificates.make_service_account_key(self.folder)
        certificates.write_tokens(self.folder / "tokens.csv", [admin, *members.values()])
        (self.folder / "audit-policy.yaml").write_text(AUDIT_POLICY)
        for name, member in members.items():
            path = self.folder / f"{name}.kubeconfig"
            certificates.write_kubeconfig(path, server=self.server, authority=self.authority, who=member)
        return admin

    def programs(self) -> list[Program]:
        """etcd, API server, controller manager and scheduler, in the order they start."""
        return [self.etcd(), self.api_server(), self.controller_manager(), self.scheduler()]

    def etcd(self) -> Program:
        client = f"http://127.0.0.1:{self.ports.etcd}"
        peer = f"http://127.0.0.1:{self.ports.etcd_peer}"
        return Program(
            name="etcd",
            argv=(
                self.binaries["etcd"],
                f"--data-dir={self.folder / 'etcd'}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                # The data is thrown away with the cluster: waiting for the disk buys nothing.
                "--unsafe-no-fsync",
            ),
            url=f"{client}/readyz",
        )

    def api_server(self) -> Program:
        return Program(
            name="kube-apiserver",
            argv=(
                self.binaries["kube-apiserver"],
                f"--etcd-servers=http://127.0.0.1:{self.ports.etcd}",
                f"--bind-address={self.address}",
                f"--advertise-address={self.address}",
                f"--secure-port={self.ports.api}",
                f"--endpoint-reconciler-type={'lease' if self.advertised else 'none'}",
                f"--tls-cert-file={self.folder / 'server.crt'}",
                f"--tls-private-key-file={self.folder / 'server.key'}",
                f"--client-ca-file={self.authority}",
                f"--kubelet-client-certificate={self.folder / 'kubelet-client.crt'}",
                f"--kubelet-client-key={self.folder / 'kubelet-client.key'}",
                "--kubelet-preferred-address-types=InternalIP",
                f"--token-auth-file={self.folder / 'tokens.csv'}",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--allow-privileged=true",
                f"--audit-policy-file={self.folder / 'audit-policy.yaml'}",
                f"--audit-log-path={self.folder / 'audit.log'}",
                f"--service-cluster-ip-range={SERVICE_CIDR}",
                f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
                f"--service-account-key-file={self.folder / 'sa.pub'}",
                f"--service-account-signing-key-file={self.folder / 'sa.key'}",
                # No kube-proxy runs beside the API server: it calls webhooks by pod address.
                "--enable-aggregator-routing=true",
                "--profiling=false",
            ),
            url=f"{self.server}/readyz",
        )

    def controller_manager(self) -> Program:
        port = self.ports.controller_manager
        return Program(
            name="kube-controller-manager",
            argv=(
                self.binaries["kube-controller-manager"],
                *self.client("kube-controller-manager"),
                "--bind-address=127.0.0.1",
                f"--secure-port={port}",
                f"--cert-dir={self.folder / 'kube-controller-manager'}",
                "--use-service-account-credentials=true",
                f"--service-account-private-key-file={self.folder / 'sa.key'}",
                f"--root-ca-file={self.authority}",
                "--profiling=false",
            ),
            url=f"https://127.0.0.1:{port}/healthz",
        )

    def scheduler(self) -> Program:
        port = self.ports.scheduler
        return Program(
            name="kube-scheduler",
            argv=(
                self.binaries["kube-scheduler"],
                *self.client("kube-scheduler"),
                "--bind-address=127.0.0.1",
                f"--secure-port={port}",
                f"--cert-dir={self.folder / 'kube-scheduler'}",
                "--profiling=false",
            ),
            url=f"https://127.0.0.1:{port}/healthz",
        )

    def client(self, name: str) -> tuple[str, ...]:
        """How a component reaches the API server. Alone, and in a hurry: no leader election, no narrow rate limit."""
        return (
            f"--kubeconfig={self.folder / f'{name}.kubeconfig'}",
            "--leader-elect=false",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
        )

    def kwok(self) -> Program:
        """Plays kubelet for nodes that carry the annotation kwok.x-k8s.io/node, and their pods."""
        return Program(
            name="kwok",
            argv=(
                self.binaries["kwok"],
                f"--kubeconfig={self.folder / 'kwok.kubeconfig'}",
                f"--config={self.stages()}",
                "--manage-all-nodes=false",
                "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
                "--node-lease-duration-seconds=40",
                f"--server-address=127.0.0.1:{self.ports.kwok}",
            ),
            url=f"http://127.0.0.1:{self.ports.kwok}/healthz",
        )

    def stages(self) -> Path:
        """What kwok does with nodes and pods."""
        if not self.pod_address:
            return SIMULATED
        path = self.folder / SIMULATED.name
        status = f'podIP: "{self.pod_address}"\n      podIPs:\n      - {{ip: "{self.pod_address}"}}'
        text, count = POD_ADDRESSES.subn(status, SIMULATED.read_text())
        assert count == 1, "the addresses of pods are set in one place"
        path.write_text(text)
        return path

    def coredns(self) -> Program:
        """Answers for cluster.local at `address`; refuses every other name, as there is nothing outside."""
        corefile = self.folder / "Corefile"
        corefile.write_text(
            f".:53 {{\n"
            f"    bind {self.address}\n"
            f"    errors\n"
            f"    ready 127.0.0.1:8181\n"
            f"    kubernetes {DOMAIN} in-addr.arpa {{\n"
            f"        kubeconfig {self.folder / 'coredns.kubeconfig'}\n"
            f"        pods insecure\n"
            f"        ttl 1\n"
            f"    }}\n"
            f"}}\n"
        )
        argv = (self.binaries["coredns"], "-conf", str(corefile))
        return Program(name="coredns", argv=argv, url="http://127.0.0.1:8181/ready")


def dns_service(address: str) -> list[dict[str, object]]:
    """The Service that pods are told to ask for names, in front of the CoreDNS process at `address`."""
    labels = {"k8s-app": "kube-dns", "kubernetes.io/service-name": "kube-dns"}
    ports = [{"name": f"dns-{protocol.lower()}", "port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    service: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}},
        "spec": {"clusterIP": DNS_SERVICE, "ports": ports},
    }
    endpoints: dict[str, object] = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address]}],
        "ports": ports,
    }
    return [service, endpoints]
