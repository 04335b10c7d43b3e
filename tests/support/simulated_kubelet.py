"""A kubelet that a test directs: it runs no container, and reports of each pod what the test wants.

Beside it everything is real: API server, controllers, scheduler, garbage collector. One node with room for `gpus`.
"""

import http.client
import io
import json
import ssl
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from testcluster.cluster import Cluster

NODE = "directed-node"
TICK_S = 0.1
HEARTBEAT_S = 10.0
STAMP = "%Y-%m-%dT%H:%M:%SZ"
Pod = dict[str, Any]


@dataclass(frozen=True)
class Behaviour:
    """ready_after: seconds from being placed until ready for the first time; None: never, or not any more. waiting:
    (reason, message) of its container meanwhile. drain: seconds it takes to stop. crashed: it has run before and has
    exited with this code. flickers: unready at the moment, though it runs: a probe has failed. forgets: the same of a
    kubelet that was restarted, which says of every container with a startup probe that it has not started."""

    ready_after: float | None = 0.0
    waiting: tuple[str, str] | None = None
    drain: float = 0.0
    crashed: int | None = None
    flickers: bool = False
    forgets: bool = False


def always_ready(pod: Pod) -> Behaviour:
    return Behaviour()


class Client:
    """The few requests this needs, as the administrator of the test cluster. Each thread keeps a connection: a TLS
    handshake costs both sides more than the request."""

    def __init__(self, cluster: Cluster) -> None:
        server = cluster.kubectl("config", "view", "--raw", "-o", "jsonpath={.clusters[0].cluster.server}").strip()
        token = cluster.kubectl("config", "view", "--raw", "-o", "jsonpath={.users[0].user.token}").strip()
        self._server = server.removeprefix("https://")
        self._head = {"Authorization": f"Bearer {token}", "User-Agent": "tests"}
        assert cluster.folder is not None
        self._context = ssl.create_default_context(cafile=str(cluster.folder / "ca.crt"))
        self._connections: dict[int, http.client.HTTPSConnection] = {}

    def __del__(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def __call__(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        """The decoded answer; urllib's HTTPError for a refusal."""
        data = None if body is None else json.dumps(body).encode()
        head = {**self._head, "Content-Type": kind}
        connection = self._connections.pop(threading.get_ident(), None)
        try:
            if connection is None:
                raise ConnectionError
            status, text = _exchange(connection, method, path, data, head)
        except ConnectionError:
            # None yet, or one that the server has closed since it was last used.
            connection = http.client.HTTPSConnection(self._server, context=self._context, timeout=30)
            status, text = _exchange(connection, method, path, data, head)
        self._connections[threading.get_ident()] = connection
        if status >= 400:
            raise urllib.error.HTTPError(path, status, "", http.client.HTTPMessage(), io.BytesIO(text))
        return json.loads(text)

    def find(self, path: str) -> Any:
        """An object, or None."""
        try:
            return self("GET", path)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def merge(self, path: str, body: object) -> Any:
        """A merge patch."""
        return self("PATCH", path, body, "application/merge-patch+json")


def _exchange(
    connection: http.client.HTTPSConnection, method: str, path: str, data: bytes | None, head: dict[str, str]
) -> tuple[int, bytes]:
    try:
        connection.request(method, path, data, head)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except BaseException:
        connection.close()
        raise


@dataclass
class Kubelet:
    """behave: image and labels of a pod -> what it does; may be replaced at any time."""

    client: Client
    behave: Callable[[Pod], Behaviour] = always_ready
    placed: dict[str, float] = field(default_factory=dict)
    stopping: dict[str, float] = field(default_factory=dict)
    last: dict[str, object] = field(default_factory=dict)
    begun: dict[str, str] = field(default_factory=dict)
    """Uid of every pod that has been ready -> when its containers were started."""
    created: dict[str, set[str]] = field(default_factory=dict)
    """Namespace -> names of every pod that was ever seen."""
    error: BaseException | None = None

    def set_up(self, gpus: int) -> None:
        capacity = {"cpu": "64", "memory": "512Gi", "pods": "500", "nvidia.com/gpu": str(gpus)}
        if self.client.find(f"/api/v1/nodes/{NODE}") is None:
            labels = {"kubernetes.io/hostname": NODE, "kubernetes.io/os": "linux"}
            self.client("POST", "/api/v1/nodes", {"metadata": {"name": NODE, "labels": labels}})
        self.heartbeat(capacity)

    def close_other_nodes(self) -> None:
        """Other tests may have added nodes to this cluster: what is directed must not land there."""
        for node in self.client("GET", "/api/v1/nodes")["items"]:
            if node["metadata"]["name"] != NODE:
                self.client.merge(f"/api/v1/nodes/{node['metadata']['name']}", {"spec": {"unschedulable": True}})

    def heartbeat(self, capacity: dict[str, str] | None = None) -> None:
        now = datetime.now(UTC).strftime(STAMP)
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": now, "reason": "On"}
        status: dict[str, Any] = {"conditions": [ready]}
        if capacity:
            status |= {"capacity": capacity, "allocatable": capacity}
        self.client.merge(f"/api/v1/nodes/{NODE}/status", {"status": status})
        if capacity:
            self.client.merge(f"/api/v1/nodes/{NODE}", {"spec": {"taints": None}})

    def run(self, stop: threading.Event) -> None:
        beat = time.monotonic()
        while not stop.wait(TICK_S):
            try:
                if time.monotonic() - beat > HEARTBEAT_S:
                    self.heartbeat()
                    beat = time.monotonic()
                self.tick(time.monotonic())
            except (OSError, http.client.HTTPException) as error:
                # A request that failed on a busy machine: the next tick tries again.
                self.error = error

    def tick(self, now: float) -> None:
        for pod in self.client("GET", "/api/v1/pods")["items"]:
            meta = pod["metadata"]
            self.created.setdefault(meta["namespace"], set()).add(meta["name"])
            if pod["spec"].get("nodeName") != NODE:
                continue
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
            behaviour = self.behave(pod)
            try:
                if meta.get("deletionTimestamp"):
                    begun = self.stopping.setdefault(meta["uid"], now)
                    if now - begun >= behaviour.drain:
                        self.client("DELETE", path, {"gracePeriodSeconds": 0})
                    continue
                age = now - self.placed.setdefault(meta["uid"], now)
                self.report(pod, path, behaviour, age)
            except urllib.error.HTTPError as error:
                if error.code not in (404, 409):
                    raise

    def report(self, pod: Pod, path: str, behaviour: Behaviour, age: float) -> None:
        uid = pod["metadata"]["uid"]
        runs = behaviour.ready_after is not None and (uid in self.begun or age >= behaviour.ready_after)
        ready = runs and not behaviour.flickers and not behaviour.forgets
        key = (ready, runs and behaviour.forgets, behaviour.waiting, behaviour.crashed)
        if self.last.get(uid) == key:
            return
        now = datetime.now(UTC)
        stamp = now.strftime(STAMP)
        # Kubernetes' times are whole seconds, and a real container takes longer than that until it is ready.
        begun = self.begun.setdefault(uid, (now - timedelta(seconds=1)).strftime(STAMP)) if runs else stamp
        if not runs:
            self.begun.pop(uid, None)
        state: dict[str, Any] = {"running": {"startedAt": begun}}
        if behaviour.waiting and not runs:
            state = {"waiting": {"reason": behaviour.waiting[0], "message": behaviour.waiting[1]}}
        containers = []
        for container in pod["spec"]["containers"]:
            status = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
            status |= {"ready": ready, "started": runs and not behaviour.forgets, "state": state}
            if behaviour.crashed is not None:
                status["lastState"] = {"terminated": {"exitCode": behaviour.crashed, "reason": "Error"}}
                status["restartCount"] = 3
            containers.append(status)
        names = ("Initialized", "ContainersReady", "Ready")
        conditions = [
            {"type": name, "status": "True" if ready or name == "Initialized" else "False", "lastTransitionTime": stamp}
            for name in names
        ]
        conditions.append({"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp})
        body = {
            "status": {
                "phase": "Running" if "running" in state else "Pending",
                "conditions": conditions,
                "containerStatuses": containers,
                "startTime": stamp,
            }
        }
        self.client.merge(f"{path}/status", body)
        self.last[uid] = key


@contextmanager
def kubelet(cluster: Cluster, *, gpus: int) -> Iterator[Kubelet]:
    """A running one."""
    one = Kubelet(client=Client(cluster))
    one.set_up(gpus)
    stop = threading.Event()
    thread = threading.Thread(target=one.run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield one
    finally:
        stop.set()
        thread.join(timeout=30)
