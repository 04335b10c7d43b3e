"""Isthmus installed on a cluster by its chart, and services applied to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from operator_world import until
from testcluster.cluster import Cluster
from testcluster.commands import CommandError

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "isthmus"
# Nobody else's, so that what an earlier run left may be removed.
SYSTEM = "isthmus-e2e-system"
RELEASE = "isthmus-e2e"
# Where the examples look for the model.
MODEL = "/var/lib/isthmus/models/smollm2-135m-instruct"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
READY_S = 300.0
GONE_S = 120.0
# Everything an InferenceService may become, and nothing that belongs to a namespace as such.
CHILDREN = (
    "deployments,statefulsets,replicasets,pods,services,networkpolicies,poddisruptionbudgets,"
    "rolescalers.serving.isthmus.dev"
)
Object = dict[str, Any]


def make_namespace(cluster: Cluster, name: str, labels: dict[str, str]) -> None:
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    cluster.kubectl("wait", "--for=create", "serviceaccount/default", "-n", name, "--timeout=60s")


def remove_namespace(cluster: Cluster, name: str) -> None:
    """Services first: Kubernetes looks only now and then whether a namespace has become empty. Deletion waits until
    everything in it has gone, so a finalizer that nobody removes fails here."""
    if name in cluster.kubectl("get", "pdsvc", "-A", "--ignore-not-found", "-o", "jsonpath={..namespace}").split():
        cluster.kubectl("delete", "pdsvc", "--all", "-n", name, "--timeout=60s")
        pods = ("pod", "-l", "serving.isthmus.dev/service", "-n", name)
        cluster.kubectl("wait", "--for=delete", *pods, f"--timeout={GONE_S:.0f}s", timeout=GONE_S + 30)
    cluster.kubectl("delete", "namespace", name, "--ignore-not-found", f"--timeout={GONE_S:.0f}s", timeout=GONE_S + 30)


@dataclass
class Installation:
    """The chart's release."""

    cluster: Cluster
    images: dict[str, str]

    def install(self) -> None:
        self.uninstall()
        make_namespace(self.cluster, SYSTEM, RESTRICTED)
        self.helm("install", "--take-ownership")

    def helm(self, action: str, *options: str) -> None:
        """`helm install` or `upgrade` with the values of these tests; every option is for this call alone."""
        engine, _, tag = self.images["engine"].rpartition(":")
        values = [f"images.engine.repository={engine}", f"images.engine.tag={tag}"]
        values.append(f"security.hostPaths={{{Path(MODEL).parent}}}")
        chosen = [part for value in values for part in ("--set", value)]
        self.cluster.helm(
            action, RELEASE, str(CHART), "-n", SYSTEM, "--wait", "--timeout=180s", *chosen, *options, timeout=240
        )

    def test(self) -> str:
        return self.cluster.helm("test", RELEASE, "-n", SYSTEM, "--logs", "--timeout=180s", timeout=240)

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", RELEASE, "-n", SYSTEM, "--ignore-not-found", "--wait", timeout=240)

    def scale(self, replicas: int) -> None:
        """The operator away (0) or back (1), seen through to the last pod."""
        self.cluster.kubectl("scale", f"deployment/{RELEASE}-operator", "-n", SYSTEM, f"--replicas={replicas}")
        if replicas:
            self.cluster.kubectl("rollout", "status", f"deployment/{RELEASE}-operator", "-n", SYSTEM, "--timeout=120s")
        else:
            label = "app.kubernetes.io/component=operator"
            self.cluster.kubectl("wait", "--for=delete", "pod", "-l", label, "-n", SYSTEM, "--timeout=120s")


@dataclass
class Deployed:
    """One InferenceService in a namespace of its own."""

    cluster: Cluster
    namespace: str
    name: str = "smollm2"
    body: Object = field(default_factory=dict)

    def apply_example(self, example: str) -> None:
        """`kubectl apply -f examples/<example>`, the file as it is."""
        path = self.load_example(example)
        self.cluster.kubectl("apply", "-n", self.namespace, "-f", str(path))

    def load_example(self, example: str) -> Path:
        """Read the file, to be changed before it is applied."""
        path = ROOT / "examples" / example
        self.body = yaml.safe_load(path.read_text())
        self.name = self.body["metadata"]["name"]
        return path

    def apply(self, change: Callable[[Object], None]) -> None:
        """Apply the present resource with `change` made to its spec."""
        self.body = copy.deepcopy(self.body)
        change(self.body["spec"])
        self.cluster.kubectl("apply", "-n", self.namespace, "-f", "-", manifest=self.body)

    def get(self) -> Object:
        return dict(self.cluster.get("pdsvc", self.name, "-n", self.namespace))

    def conditions(self) -> dict[str, Object]:
        return {c["type"]: c for c in self.get().get("status", {}).get("conditions", ())}

    def ready(self, seconds: float = READY_S) -> Object:
        """Wait until the present spec is rolled out and serving; returns the status."""

        def so() -> bool:
            found = self.get()
            status = found.get("status", {})
            states = {c["type"]: c["status"] for c in status.get("conditions", ())}
            return (
                status.get("observedGeneration") == found["metadata"]["generation"]
                and states.get("Ready") == "True"
                and status["revision"]["current"] == status["revision"]["updated"]
            )

        until(so, seconds, self.describe, every=0.5)
        return dict(self.get()["status"])

    def describe(self) -> str:
        """What a person would look at."""
        told = [f"{kind}: {c['status']} {c['reason']}: {c['message']}" for kind, c in self.conditions().items()]
        told.append(self.cluster.kubectl("get", "pods,events", "-n", self.namespace, "-o", "wide"))
        for pod in self.pods():
            try:
                log = self.cluster.kubectl("logs", pod["metadata"]["name"], "-n", self.namespace, "--tail=60")
            except CommandError as error:
                log = str(error)
            told.append(f"--- {pod['metadata']['name']}\n{log}")
        return "\n".join(told)

    def pods(self, role: str = "") -> list[Object]:
        chosen = f"serving.isthmus.dev/service={self.name}" + (f",serving.isthmus.dev/role={role}" if role else "")
        return list(self.cluster.get("pods", "-n", self.namespace, "-l", chosen)["items"])

    def restarts(self) -> dict[str, int]:
        """Of every container, the ones that prepare a pod included: pod/container -> restarts that there were."""
        return {
            f"{pod['metadata']['name']}/{one['name']}": one["restartCount"]
            for pod in self.pods()
            for kind in ("initContainerStatuses", "containerStatuses")
            for one in pod["status"].get(kind, ())
            if one["restartCount"]
        }

    def uids(self, role: str = "") -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.pods(role)}

    def children(self) -> list[str]:
        chosen = f"-l=serving.isthmus.dev/service={self.name}"
        return self.cluster.kubectl("get", CHILDREN, "-n", self.namespace, chosen, "-o", "name").split()

    def delete(self) -> None:
        """Delete the resource alone; everything it was made of must follow."""
        self.cluster.kubectl("delete", "pdsvc", self.name, "-n", self.namespace, "--timeout=60s")
        until(lambda: not self.children(), GONE_S, self.children, every=0.5)
