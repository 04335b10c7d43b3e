"""What the bench runs against: the light test cluster, the operator as a process, and what answers for pods."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from testcluster.cluster import Cluster

from isthmus_operator.render.names import ENGINE_PORT, ROUTER_PORT, SERVICE_LABEL
from isthmus_operator.shell.rbac import LEASE_RULES, policy_rules

HOME = "isthmus-system"
ACCOUNT = "isthmus-operator"
USER = f"system:serviceaccount:{HOME}:{ACCOUNT}"
API = "/apis/serving.isthmus.dev/v1alpha1"
CRDS = Path(__file__).resolve().parents[2] / "crds"
TICK = os.sysconf("SC_CLK_TCK")
POLL_S = 0.25
Object = dict[str, Any]


async def until(true: Callable[[], Any], seconds: float, what: str) -> float:
    """Ask again until it holds; how long it took. A foreign process has no event to wait on."""
    begin = time.monotonic()
    while True:
        found = true()
        if asyncio.iscoroutine(found):
            found = await found
        waited = time.monotonic() - begin
        if found:
            return waited
        if waited > seconds:
            raise SystemExit(f"not within {seconds:.0f} s: {what}")
        await asyncio.sleep(POLL_S)


class Client:
    """The cluster's administrator."""

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.folder is not None
        config = json.loads(cluster.kubeconfig.read_text())
        self._base = cluster.server
        self._token = config["users"][0]["user"]["token"]
        self._trust = ssl.create_default_context(cafile=str(cluster.folder / "ca.crt"))
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Open between enter and exit."""
        assert self._session is not None
        return self._session

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(ssl=self._trust, limit=16)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def accepts(self, method: str, path: str, body: object) -> bool:
        """Whether the server does what it is asked."""
        return (await self._send(method, path, body, {}))[0] < 400

    async def __call__(self, method: str, path: str, body: object = None, **head: str) -> Any:
        """The decoded answer; ends the bench on a refusal."""
        status, text = await self._send(method, path, body, head)
        if status >= 400:
            raise SystemExit(f"{method} {path}: HTTP {status}: {text[:500]}")
        return json.loads(text)

    async def _send(self, method: str, path: str, body: object, head: dict[str, str]) -> tuple[int, str]:
        head = {"Authorization": f"Bearer {self._token}", "User-Agent": "bench"} | head
        async with self.session.request(method, self._base + path, json=body, headers=head) as answer:
            return answer.status, await answer.text()

    async def metadata(self, path: str) -> list[Object]:
        """The metadata of every child of any service."""
        accept = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
        found = await self("GET", f"{path}?labelSelector={SERVICE_LABEL}", Accept=accept)
        return [item["metadata"] for item in found["items"]]


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def furnish(cluster: Cluster, folder: Path, nodes: int, namespaces: list[str]) -> Path:
    """CRDs, nodes, namespaces, and an account with the operator's documented rights; its kubeconfig."""
    for path in sorted(CRDS.glob("*.yaml")):
        cluster.kubectl("apply", "-f", str(path))
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    for number in range(nodes):
        cluster.add_simulated_node(f"node{number}", cpu="10000", memory="100Ti", pods=5000)
    cluster.apply(*({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": n}} for n in [HOME, *namespaces]))
    rbac, meta = "rbac.authorization.k8s.io", {"name": ACCOUNT}
    version = f"{rbac}/v1"
    subjects = [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": HOME}]
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": version, "kind": "ClusterRole", "metadata": meta, "rules": policy_rules()},
        {"apiVersion": version, "kind": "Role", "metadata": meta, "rules": policy_rules(LEASE_RULES)},
        *(
            {
                "apiVersion": version,
                "kind": f"{scope}RoleBinding",
                "metadata": meta,
                "roleRef": {"apiGroup": rbac, "kind": f"{scope}Role", "name": ACCOUNT},
                "subjects": subjects,
            }
            for scope in ("", "Cluster")
        ),
        namespace=HOME,
    )
    token = cluster.kubectl("create", "token", ACCOUNT, "-n", HOME, "--duration=8h").strip()
    config = json.loads(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path = folder / "operator.kubeconfig"
    path.touch(mode=0o600)
    path.write_text(json.dumps(config))
    return path


def call_webhook(cluster: Cluster, folder: Path) -> int:
    """Have every InferenceService judged by the operator first, as the chart does; the port it is to listen on."""
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    make += ["-days", "2", "-subj", "/CN=webhook", "-addext", "subjectAltName=IP:127.0.0.1"]
    make += ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    subprocess.run(make, check=True, capture_output=True)
    port, resource = free_port(), {"resources": ["inferenceservices"], "operations": ["CREATE", "UPDATE"]}
    bundle = base64.b64encode((folder / "tls.crt").read_bytes()).decode()
    webhook = {
        "name": "inferenceservices.validation.serving.isthmus.dev",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "clientConfig": {"url": f"https://127.0.0.1:{port}/validate", "caBundle": bundle},
        "rules": [resource | {"apiGroups": ["serving.isthmus.dev"], "apiVersions": ["v1alpha1"]}],
    }
    version = "admissionregistration.k8s.io/v1"
    kind, meta = "ValidatingWebhookConfiguration", {"name": ACCOUNT}
    cluster.apply({"apiVersion": version, "kind": kind, "metadata": meta, "webhooks": [webhook]})
    return port


class Operator:
    """`isthmus operator` with its production settings: webhook, lease, a resync every minute."""

    def __init__(self, kubeconfig: Path, folder: Path, webhook_port: int, session: aiohttp.ClientSession) -> None:
        self._kubeconfig = kubeconfig
        self._webhook = [f"--webhook-port={webhook_port}", f"--webhook-cert-dir={folder}"]
        self._log = folder / "operator.log"
        self._session = session
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def start(self) -> None:
        """Start it; `ready` says when it watches."""
        self._port = free_port()
        command = [sys.executable, "-P", "-m", "isthmus_operator", "operator", f"--kubeconfig={self._kubeconfig}"]
        command.append("--profile=permissive")
        command += ["--metrics-host=127.0.0.1", f"--metrics-port={self._port}", "--health-port=0", *self._webhook]
        env = {**os.environ, "POD_NAMESPACE": HOME, "POD_NAME": "bench"}  # noqa: TID251
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)

    async def stop(self) -> None:
        """As a rollout of the operator does it."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self._process.wait, 60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        if self._process.poll() is not None:
            raise SystemExit(
                f"the operator ended with status {self._process.returncode}: {self._log.read_text()[-3000:]}"
            )
        return self._process.pid

    async def ready(self) -> bool:
        """Whether /readyz says so."""
        assert self.pid
        with suppress(aiohttp.ClientError):
            async with self._session.get(f"http://127.0.0.1:{self._port}/readyz") as answer:
                return answer.status == 200
        return False

    async def metrics(self) -> dict[str, float]:
        """Samples by name with labels; empty while it does not answer."""
        assert self.pid
        try:
            async with self._session.get(f"http://127.0.0.1:{self._port}/metrics") as answer:
                lines = (await answer.text()).splitlines()
        except aiohttp.ClientError:
            return {}
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def cpu_s(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def memory_mib(self, key: str) -> float:
        """`VmRSS`, or `VmHWM`: the most it ever was."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

    def complaints(self) -> list[str]:
        """Warnings, errors and tracebacks of its log."""
        lines = self._log.read_text().splitlines()
        return [line for line in lines if " WARNING " in line or " ERROR " in line or line.startswith("Traceback")]


def own_address() -> str:
    """An address of this machine that is not loopback, which EndpointSlices refuse; empty where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


class Pods:
    """Answers /info for every simulated pod, all of which have this machine's address."""

    def __init__(self, address: str) -> None:
        self.address = address
        engine = {
            "fingerprint": "bench",
            "model": "m",
            "waiting": 0,
            "transfer": {"mode": "Direct", "transport": "tcp", "probed_gbps": 1.0, "ready": True, "reason": ""},
            "kv": {"physical_blocks": 9000, "usable_blocks": 8999, "bytes_per_block": 368640, "max_model_len": 8192},
        }
        router = {"engines": [{"url": f"http://{address}:{ENGINE_PORT}", "role": "decode", "reason": ""}]}
        self._answers = {ENGINE_PORT: _http(engine), ROUTER_PORT: _http(router)}
        self._servers: list[asyncio.Server] = []

    async def start(self) -> bool:
        """Whether both ports were free."""
        try:
            for port, answer in self._answers.items():
                self._servers.append(
                    await asyncio.get_running_loop().create_server(
                        lambda answer=answer: _Answerer(answer), self.address, port
                    )
                )
        except OSError:
            self.stop()
            return False
        return True

    def stop(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()


def _http(body: Object) -> bytes:
    raw = json.dumps(body).encode()
    return f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


class _Answerer(asyncio.Protocol):
    """One answer to every request, which has no body."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(self._answer * data.count(b"\r\n\r\n"))
