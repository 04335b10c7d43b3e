"""Pods that the end-to-end tests run beside a service: a client of it, and what it downloads its model from."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from installed import MODEL, Object
from operator_world import until
from testcluster.cluster import Cluster
from testcluster.commands import CommandError

SCRIPTS = Path(__file__).parents[1] / "e2e" / "kubernetes"


def create_script_pod(
    cluster: Cluster, namespace: str, image: str, name: str, *command: str, node: int = -1, model: bool = False
) -> None:
    """A pod `name` that sees SCRIPTS/<name>.py in /scripts, restricted and without rights; waits until it is ready.
    `model`: it also sees the model in /model, from the node."""
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    places: dict[str, Object] = {"/scripts": {"configMap": {"name": name}}, "/tmp": {"emptyDir": {}}}
    if model:
        places["/model"] = {"hostPath": {"path": MODEL, "type": "Directory"}}
    container = {
        "name": name,
        "image": image,
        "command": list(command),
        "securityContext": security,
        "volumeMounts": [{"name": place.strip("/"), "mountPath": place} for place in places],
    }
    spec: Object = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": place.strip("/"), **source} for place, source in places.items()],
    }
    if cluster.nodes:
        spec["nodeSelector"] = {"kubernetes.io/hostname": list(cluster.nodes)[node]}
    script = {f"{name}.py": (SCRIPTS / f"{name}.py").read_text()}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": script},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec},
        namespace=namespace,
    )
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "-n", namespace, "--timeout=120s", timeout=150)


def create_bucket(cluster: Cluster, namespace: str, image: str, bytes_per_second: float) -> None:
    """Object storage with the model in s3://models/model at http://bucket.<namespace>:9000, whose link is that fast.
    Any key opens it."""
    command = ("python", "/scripts/bucket.py", "/model", str(bytes_per_second))
    create_script_pod(cluster, namespace, image, "bucket", *command, model=True)
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "bucket"},
            "spec": {"selector": {"app": "bucket"}, "ports": [{"port": 9000}]},
        },
        namespace=namespace,
    )
    connect = "import socket; socket.create_connection(('127.0.0.1', 9000), 1)"

    def filled() -> bool:
        try:
            cluster.kubectl("exec", "bucket", "-n", namespace, "--", "python", "-c", connect)
        except CommandError:
            return False
        return True

    until(filled, 120, lambda: cluster.kubectl("logs", "bucket", "-n", namespace), every=1.0)


@dataclass
class Load:
    """Requests that ended so far, each {question, started, seconds} and either answer or error."""

    workers: int
    results: list[Object] = field(default_factory=list)
    done: bool = False

    def errors(self) -> list[Object]:
        return [one for one in self.results if "error" in one]

    def more(self, count: int, seconds: float = 180.0) -> None:
        """Wait for `count` further requests that began from now on."""
        # As many as there are workers began before.
        wanted = len(self.results) + self.workers + count
        until(
            lambda: len(self.results) >= wanted,
            seconds,
            lambda: f"{len(self.results)} requests ended; the last: {self.results[-3:]}",
        )


@dataclass
class Client:
    """A pod with the openai client, restricted and without rights."""

    cluster: Cluster
    namespace: str
    image: str
    node: int = -1
    """Which of the nodes, where they are ours."""

    def create(self) -> None:
        create_script_pod(self.cluster, self.namespace, self.image, "client", "sleep", "infinity", node=self.node)

    def command(self, *arguments: str) -> list[str]:
        return ["exec", "-i", "client", "-n", self.namespace, "--", "python", "/scripts/client.py", *arguments]

    def ask(self, url: str, model: str, questions: Sequence[str], max_tokens: int) -> dict[str, str]:
        """Stream an answer to each question, one after another."""
        said = self.cluster.kubectl(
            *self.command("ask", url, model, str(max_tokens)), manifest=list(questions), timeout=300
        )
        return dict(json.loads(said))

    @contextmanager
    def load(self, url: str, model: str, questions: Sequence[str], max_tokens: int, workers: int) -> Iterator[Load]:
        """Keep `workers` streams going. On leaving, every request has ended, each exactly once."""
        command = [self.cluster.kubectl_path, f"--kubeconfig={self.cluster.kubeconfig}"]
        command += self.command("load", url, model, str(max_tokens), str(workers))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None
        told = Load(workers)

        def read(lines: Iterator[str]) -> None:
            for line in lines:
                one = json.loads(line)
                if one == "done":
                    told.done = True
                else:
                    told.results.append(one)

        reader = threading.Thread(target=read, args=(iter(process.stdout),), daemon=True)
        reader.start()
        try:
            process.stdin.write(json.dumps(list(questions)) + "\n")
            process.stdin.flush()
            told.more(1)
            yield told
            process.stdin.write("stop\n")
            process.stdin.flush()
            reader.join(timeout=240)
            assert told.done, f"the load did not end; the last requests: {told.results[-3:]}"
            assert process.wait(timeout=30) == 0
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdin.close()
            reader.join(timeout=10)
            process.stdout.close()


def client_image(images: dict[str, str]) -> str:
    """The tests' engine image has the checkout's openai; a user's own cluster names an image that has one."""
    return os.environ.get("E2E_CLIENT_IMAGE") or images["engine"]
