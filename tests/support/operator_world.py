"""The operator as a process, an InferenceService of a test, and waiting for what they come to."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from simulated_kubelet import Client, Kubelet
from testcluster.cluster import Cluster

ROOT = Path(__file__).parents[2]
API = "/apis/serving.isthmus.dev/v1alpha1"
Object = dict[str, Any]
PATIENCE_S = 150.0
# A watch that is open when the operator is told to end may be closed by the event loop's end instead of by kopf, whose
# context manager then complains about it (kopf/_cogs/clients/watching.py, `infinite_watch`).
_LEFT_BY_KOPF = (
    r"(?s)[^\n]*an error occurred during closing of asynchronous generator <async_generator object infinite_watch"
    r".*?RuntimeError: generator didn't stop after athrow\(\)\n"
)


def has_failed(log: str) -> bool:
    """Whether there is a traceback in the log of an operator, but for what kopf may leave at its end."""
    return "Traceback" in re.sub(_LEFT_BY_KOPF, "", log)


class Operator:
    """`isthmus operator` as a process."""

    def __init__(self, cluster: Cluster, log: Path, *flags: str) -> None:
        self._command = [sys.executable, "-m", "isthmus_operator", "operator", "--profile=permissive"]
        self._command.append("--metrics-port=0")
        self._command += ["--health-port=0", "--metrics-host=127.0.0.1", f"--kubeconfig={cluster.kubeconfig}", *flags]
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            env = {**os.environ, "PYTHONSAFEPATH": "1"}
            self.process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, env=env)

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process = None


@dataclass
class Service:
    """One InferenceService of a test, and short words for what tests do."""

    client: Client
    cluster: Cluster
    namespace: str
    name: str = "svc"
    kubelet: Kubelet | None = None
    spec: Object = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"{API}/namespaces/{self.namespace}/inferenceservices/{self.name}"

    def apply(self, **changes: Any) -> Object:
        """Create, or replace top-level fields of the spec."""
        base = {
            "mode": "Disaggregated",
            "model": {"source": {"hostPath": {"path": "/models/m"}}},
            "engine": {"image": "engine:1"},
            "roles": roles(1, 1),
        }
        self.spec = {key: value for key, value in ((self.spec or base) | changes).items() if value is not None}
        body = {
            "apiVersion": "serving.isthmus.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": self.name},
            "spec": self.spec,
        }
        self.cluster.apply(body, namespace=self.namespace)
        return self.get()

    def get(self) -> Object:
        found: Object = self.client("GET", self.path)
        return found

    def children(self, resource: str, *, group: str = "/api/v1") -> list[Object]:
        selector = f"labelSelector=serving.isthmus.dev%2Fservice%3D{self.name}"
        found: list[Object] = self.client("GET", f"{group}/namespaces/{self.namespace}/{resource}?{selector}")["items"]
        return found

    def deployments(self) -> list[Object]:
        return self.children("deployments", group="/apis/apps/v1")

    def pods(self, role: str = "") -> list[Object]:
        return [p for p in self.children("pods") if role in ("", p["metadata"]["labels"]["serving.isthmus.dev/role"])]

    def condition(self, name: str) -> Object:
        found = {c["type"]: c for c in (self.get().get("status") or {}).get("conditions", ())}
        return found.get(name, {"status": "", "reason": "", "message": ""})

    def events(self) -> list[str]:
        """Reasons of its Events."""
        items = self.client("GET", f"/api/v1/namespaces/{self.namespace}/events")["items"]
        return [e["reason"] for e in items if e["involvedObject"]["kind"] == "InferenceService"]

    def writes_since(self, begin: datetime) -> list[str]:
        """The operator's, in the namespace, as the API server logs them; also those that changed nothing."""
        assert self.cluster.folder is not None
        found = []
        # The API server may be in the middle of a line.
        whole, _, _ = (self.cluster.folder / "audit.log").read_text().rpartition("\n")
        for line in whole.splitlines():
            event = json.loads(line)
            target = event.get("objectRef") or {}
            ours = target.get("namespace") == self.namespace and "OpenAPI-Generator" in event.get("userAgent", "")
            if ours and datetime.fromisoformat(event["stageTimestamp"]) > begin:
                name = f"{target['resource']}/{target.get('name')}"
                found.append(f"{event['verb']} {name} {target.get('subresource', '')}")
        return found

    def cluster_cli(self, *arguments: str) -> str:
        """Output of `isthmus COMMAND` against this cluster."""
        command = [sys.executable, "-m", "isthmus_operator", *arguments, "-n", self.namespace]
        command += ["--kubeconfig", str(self.cluster.kubeconfig)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def ready(self, timeout: float = 90) -> None:
        """Wait until the present generation is wholly rolled out."""

        def done() -> bool:
            body = self.get()
            seen = (body.get("status") or {}).get("observedGeneration") == body["metadata"]["generation"]
            return seen and self.condition("Ready")["status"] == "True"

        until(done, timeout, lambda: json.dumps(self.get().get("status"), indent=1))

    def reason(self, condition: str, reason: str, timeout: float = 60) -> Object:
        """Wait until a condition has a reason; the condition."""
        until(lambda: self.condition(condition)["reason"] == reason, timeout, lambda: json.dumps(self.get()["status"]))
        return self.condition(condition)


def roles(prefill: int, decode: int, *, gpus: int = 0) -> Object:
    resources = {"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus else {}
    return {
        "prefill": {"scaling": {"replicas": prefill}, **resources},
        "decode": {"scaling": {"replicas": decode}, **resources},
    }


def until(
    true: Callable[[], object], timeout: float, detail: Callable[[], object] = lambda: "", *, every: float = 0.1
) -> None:
    """Ask again `every` so many seconds until it holds; fails with `detail` after `timeout` seconds.

    A shorter timeout than PATIENCE_S is taken for that: a busy machine is no failing test.
    """
    pause = threading.Event()
    timeout = max(timeout, PATIENCE_S)
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, f"not within {timeout} s: {detail()}"
        pause.wait(every)
